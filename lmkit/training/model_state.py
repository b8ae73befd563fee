"""Turn models and optimizers into named tensors, and back.

Weights have the plain model's parameter names, also where the model is compiled or wrapped. Tied weights are saved
once. The optimizer's `exp_avg` of a parameter is called `layers.0.ffn.w1.weight.exp_avg`. In a sharded optimizer it
is `3.exp_avg`, for bucket 3 of the layout that the checkpoint's state describes. State moves freely between whole
and sharded optimizers and between numbers of ranks. A parameter in which several matrices are joined has several
names (see `parameter_names`): its state is saved in parts.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import nn

from lmkit.errors import LmkitError, UsageError, reason, some_of
from lmkit.model.names import parameter_names, plain_name
from lmkit.optim.adamw import MASTER
from lmkit.parallel.sharded_state import ShardedState
from lmkit.parallel.shards import BucketLayout, ShardLayout, consolidate
from lmkit.recipe.tables import ModelConfig
from lmkit.registry import ATTENTION, OPERATIONS
from lmkit.storage import write_atomic
from lmkit.storage.inputs import read_input
from lmkit.training.atomic_checkpoint import damaged
from lmkit.training.checkpoint import parse_tensors
from lmkit.training.precision import hold_weights

if TYPE_CHECKING:
    from lmkit.model.transformer import TransformerLM

log = logging.getLogger("lmkit")

Tensors = Mapping[str, torch.Tensor]
Layout = dict[str, Any]
States = dict[str, dict[str, Any]]
"""parameter or bucket -> name of the state -> value"""


# A model and an optimizer in one file


def save_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    step: int,
    out: str | os.PathLike[str] | IO[bytes],
) -> None:
    """Save a model, an optimizer and a step number to one safetensors file.

    Args:
        model: any module. Compiled and DDP-wrapped modules are saved as the plain module.
        optimizer: any `torch.optim.Optimizer` whose state consists of tensors and numbers; None: save none.
        out: a path (written atomically) or a binary file object.

    Raises:
        ValueError: the optimizer's state is sharded over several ranks.
        OSError: the file cannot be written.
    """
    tensors = {f"model.{name}": tensor for name, tensor in model_weights(model).items()}
    metadata = {"step": json.dumps(step)}
    if optimizer is not None:
        layout = optimizer_layout(optimizer)
        if layout is not None and layout["world_size"] > 1:
            raise ValueError("this optimizer holds one shard of several; lmkit train saves all of them")
        tensors |= {f"optimizer.{name}": value for name, value in optimizer_tensors(optimizer, model).items()}
        metadata["layout"] = json.dumps(layout)
        metadata["groups"] = json.dumps(
            [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        )
    # clone: entries may share memory with one another, which the format does not allow
    content = safetensors.torch.save({name: value.clone() for name, value in tensors.items()}, metadata)
    if isinstance(out, str | os.PathLike):
        write_atomic(out, content)
    else:
        out.write(content)


def load_checkpoint(
    source: str | os.PathLike[str] | IO[bytes],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
) -> int:
    """Load a file of `save_checkpoint` into a model and an optimizer; return its step number.

    The optimizer's hyperparameters (learning rate, betas...) are restored, too. No pickle is read.

    Raises:
        UsageError: the file does not exist, or belongs to another model.
        LmkitError: the file is damaged, or its optimizer state belongs to another optimizer.
    """
    origin = Path(source if isinstance(source, str | os.PathLike) else "file object")
    try:
        data = read_input(origin) if isinstance(source, str | os.PathLike) else source.read()
    except OSError as error:
        hint = "name a file that save_checkpoint wrote"
        raise UsageError("checkpoint.not_found", f"{origin}: {reason(error)}", hint=hint) from error
    tensors = parse_tensors(data, path=origin)
    # The header of a safetensors file: its length in 8 bytes, then JSON.
    metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__", {})
    try:
        step, layout, groups = (json.loads(metadata.get(key, "null")) for key in ("step", "layout", "groups"))
    except (ValueError, RecursionError) as error:
        raise damaged(origin, "metadata is not JSON") from error
    weights, states = (
        {name.removeprefix(part): value for name, value in tensors.items() if name.startswith(part)}
        for part in ("model.", "optimizer.")
    )
    if not isinstance(step, int):
        raise damaged(origin, "not a file of save_checkpoint")
    load_weights(model, weights, origin=origin)
    if optimizer is not None and groups is not None:
        load_masters(optimizer, model, weights)
        load_optimizer_tensors(optimizer, model, [states], layout, origin=str(origin))
        try:
            for group, saved in zip(optimizer.param_groups, groups, strict=True):
                group.update({key: tuple(v) if isinstance(v, list) else v for key, v in saved.items()})
        except (ValueError, TypeError, AttributeError) as error:
            raise LmkitError(
                "checkpoint.other_optimizer",
                f"{origin}: other parameter groups than the optimizer's {len(optimizer.param_groups)}",
                hint="make the optimizer as it was when it was saved",
            ) from error
    return step


# Weights


def model_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the live weights by plain name; waits for weights that are still being gathered."""
    return {name: tensor.detach() for name, tensor in _plain(model.state_dict(keep_vars=True)).items()}


def load_weights(model: nn.Module, tensors: Tensors, *, origin: Path) -> None:
    """Copy saved weights into a model, whether it is plain, compiled or wrapped.

    Raises:
        UsageError: other names or shapes; the message lists the first differences.
        LmkitError: a number is too large for the model's dtype ("weights.not_finite").
    """
    state = model.state_dict(keep_vars=True)
    wanted = _plain(state)
    wrong = [
        f"{name}: saved {_shape(tensors.get(name))}, model {_shape(wanted.get(name))}"
        for name in [*wanted, *(name for name in tensors if name not in wanted)]
        if _shape(tensors.get(name)) != _shape(wanted.get(name))
    ]
    if wrong:
        raise UsageError(
            "checkpoint.other_model",
            f"{origin}: weights of another model: {some_of(wrong, separator='; ')}",
            hint="use the recipe that the checkpoint was made with",
        )
    # By identity, because tied weights have several names and are saved under one.
    saved = {
        id(tensor): cast_weight(tensors[name], tensor.dtype, name=name, origin=origin)
        for name, tensor in wanted.items()
    }
    model.load_state_dict({name: saved[id(tensor)] for name, tensor in state.items()})


def cast_weight(weight: torch.Tensor, dtype: torch.dtype, *, name: str, origin: Path) -> torch.Tensor:
    """Return a weight in another dtype.

    Raises:
        LmkitError: a finite number of it would be infinite ("weights.not_finite").
    """
    cast = weight.to(dtype)
    if cast.dtype != weight.dtype and not torch.equal(cast.isfinite(), weight.isfinite()):
        largest = f"{torch.finfo(dtype).max:.4g}"
        kind = str(dtype).removeprefix("torch.")
        raise LmkitError(
            "weights.not_finite",
            f"{origin}: {name} has numbers beyond {largest}, the largest of {kind}",
            hint='use a wider dtype: export with --dtype fp32, train with train.precision = "fp32"',
        )
    return cast


def _plain(state: Tensors) -> dict[str, torch.Tensor]:
    """Return a state dict's tensors by plain name, tied ones once."""
    plain: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in state.items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            plain[plain_name(name)] = tensor
    return plain


def _shape(tensor: torch.Tensor | None) -> str:
    return "missing" if tensor is None else "x".join(map(str, tensor.shape)) or "scalar"


def filled_model(
    config: ModelConfig, tensors: Tensors, *, device: torch.device | str, origin: Path
) -> TransformerLM:
    """Return a model with these weights in eval mode, neither compiled nor wrapped.

    Its matrices are bf16 if some weight is. Where its attention kernel does not run on the device, it uses `sdpa`,
    and the log says so. Where its operations do not, it uses others.
    """
    from lmkit.model.transformer import TransformerLM

    model = TransformerLM(_runnable(config, device), device=device)
    if any(tensor.dtype == torch.bfloat16 for tensor in tensors.values()):
        hold_weights(model, "bf16")
    load_weights(model, tensors, origin=origin)
    return model.eval()


def _runnable(config: ModelConfig, device: torch.device | str) -> ModelConfig:
    """Return the table with an attention kernel and operations that run on the device."""
    place, attention, operations = torch.device(device).type, config.attention, config.operations
    if place not in ATTENTION.facts(attention).devices:
        log.warning("attention %s does not run on %s: using sdpa", attention, place)
        attention = "sdpa"
    if operations in OPERATIONS.names and place not in OPERATIONS.facts(operations).devices:
        operations = "auto"
    return config.changed(attention=attention, operations=operations)


# Optimizer state


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return this rank's live state tensors by name. Numbers become scalar tensors (int64, float64)."""
    states: States = {}
    if isinstance(optimizer, ShardedState):
        states = optimizer.state_dict()["state"]
    else:
        for parameter, shapes in _held(optimizer, model).items():
            if parameter in optimizer.state:
                states |= _split(optimizer.state[parameter], shapes)
    return {
        f"{name}.{key}": _as_tensor(value) for name, state in states.items() for key, value in state.items()
    }


def optimizer_layout(optimizer: torch.optim.Optimizer) -> Layout | None:
    """Return how the state is cut into shards, as JSON; None if every rank holds all of it."""
    return optimizer.shard_layout.as_json() if isinstance(optimizer, ShardedState) else None


def own_shard(optimizer: torch.optim.Optimizer, layout: Layout | None) -> int | None:
    """Return which shard of a saved state is just what this rank holds; None: there is none."""
    if layout is None or not isinstance(optimizer, ShardedState):
        return None
    try:
        is_equal = ShardLayout.from_json(layout) == optimizer.shard_layout
    except (ValueError, KeyError, TypeError, AttributeError):  # `load_optimizer_tensors` says what is wrong
        return None
    return int(optimizer.state_dict()["rank"]) if is_equal else None


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    shards: Sequence[Tensors],
    layout: Layout | None,
    *,
    origin: str,
    own: int | None = None,
) -> None:
    """Load saved state into an optimizer, which may be sharded otherwise than the saved one.

    Args:
        shards, layout: the state of all ranks that saved it, or one part without a layout.
        origin: names the checkpoint in errors.
        own: of `own_shard`; `shards` is then that one alone.

    Raises:
        LmkitError: the state belongs to other parameters.
    """
    if not any(shards):
        return  # of an imported model: the optimizer begins afresh
    grouped = [_by_owner(shard) for shard in shards]
    try:
        if own is not None:
            assert isinstance(optimizer, ShardedState)
            assert layout is not None
            (state,) = _shard_states(grouped, layout, groups=len(optimizer.param_groups))
            optimizer.load_state_dict({**state, "rank": own})
        elif isinstance(optimizer, ShardedState):
            _load_into_shards(optimizer, model, grouped, layout)
        else:
            whole = grouped[0] if layout is None else consolidate(_shard_states(grouped, layout, groups=0))
            _load_into_whole(optimizer, model, whole)
    # Layouts are free-form JSON.
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise LmkitError(
            "checkpoint.other_optimizer",
            f"{origin}: optimizer state: {error}",
            hint="the checkpoint belongs to another model or optimizer",
        ) from error


def load_masters(optimizer: torch.optim.Optimizer, model: nn.Module, weights: Tensors) -> None:
    """Load the masters of bf16 weights, if the optimizer keeps some, from whole weights of any dtype.

    Call it after the model's weights were loaded, and before the state: that may hold masters of its own.
    """
    if isinstance(optimizer, ShardedState):
        optimizer.load_masters(weights)
        return
    for parameter, shapes in _held(optimizer, model).items():
        master = optimizer.state.get(parameter, {}).get(MASTER)
        if master is not None:
            master.copy_(torch.cat([weights[name].reshape(-1) for name in shapes]).view_as(master))


def _load_into_shards(
    optimizer: ShardedState, model: nn.Module, grouped: list[States], layout: Layout | None
) -> None:
    if layout is None:
        # Treat whole state as the state of one rank whose buckets hold one parameter each.
        shapes = {name: shape for parts in parameter_names(model).values() for name, shape in parts.items()}
        sizes = {name: shape.numel() for name, shape in shapes.items()}
        names = [name for name in grouped[0] if name in sizes]
        buckets = tuple(BucketLayout(0, (name,), (sizes[name],), sizes[name]) for name in names)
        layout = ShardLayout(1, buckets).as_json()
        flat = [{key: _flat(value) for key, value in grouped[0][name].items()} for name in names]
        grouped = [{str(index): state for index, state in enumerate(flat)}]
    optimizer.load_resharded(_shard_states(grouped, layout, groups=len(optimizer.param_groups)))


def _shard_states(grouped: Sequence[States], layout: Layout, *, groups: int) -> list[dict[str, Any]]:
    """Return state dicts as a sharded optimizer makes them; empty groups change no hyperparameter."""
    return [
        {"rank": rank, "layout": layout, "state": states, "param_groups": [{}] * groups}
        for rank, states in enumerate(grouped)
    ]


def _load_into_whole(optimizer: torch.optim.Optimizer, model: nn.Module, whole: States) -> None:
    held = _held(optimizer, model)
    unknown = sorted(set(whole) - {name for shapes in held.values() for name in shapes})
    if unknown:
        raise ValueError(f"unknown parameters {some_of(unknown)}")
    for parameter, shapes in held.items():
        if not shapes.keys() & whole.keys():
            continue
        restored = _join({name: whole[name] for name in shapes}, shapes, parameter)
        kept = optimizer.state.get(parameter, {}).get(MASTER)
        if MASTER in restored:
            with torch.no_grad():
                parameter.copy_(restored[MASTER])
            if kept is None:
                del restored[MASTER]
        elif kept is not None:
            restored[MASTER] = kept  # of `load_masters`
        dtype = restored.get(MASTER, parameter).dtype
        device = getattr(optimizer, "state_device", parameter.device)
        optimizer.state[parameter] = {
            key: value.to(device, dtype)
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape
            else value
            for key, value in restored.items()
        }


def _split(state: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> States:
    """Return the state of each part of a parameter; what is not shaped as the parameter, all parts have."""
    parts: States = {name: {} for name in shapes}
    sizes = [shape.numel() for shape in shapes.values()]
    for key, value in state.items():
        values: Sequence[Any] = [value] * len(shapes)
        if len(shapes) > 1 and isinstance(value, torch.Tensor) and value.numel() == sum(sizes):
            flats = value.flatten().split(sizes)
            values = [flat.view(shape) for flat, shape in zip(flats, shapes.values(), strict=True)]
        for name, part in zip(shapes, values, strict=True):
            parts[name][key] = part
    return parts


def _join(parts: States, shapes: Mapping[str, torch.Size], parameter: torch.Tensor) -> dict[str, Any]:
    """Return the state of a parameter from that of its parts, flat or not; numbers are those of the first part."""
    first = next(iter(parts.values()))
    joined: dict[str, Any] = {}
    for key, value in first.items():
        joined[key] = value
        if isinstance(value, torch.Tensor) and value.dim() == 0:
            joined[key] = value.clone()
        elif isinstance(value, torch.Tensor):
            for name, shape in shapes.items():
                if (size := parts[name][key].numel()) != shape.numel():
                    raise ValueError(f"{name}.{key} has {size} elements, the parameter {shape.numel()}")
            flat = torch.cat([parts[name][key].reshape(-1) for name in shapes])
            joined[key] = flat.view_as(parameter)
    return joined


def _held(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[nn.Parameter, Mapping[str, torch.Size]]:
    """Return the names of the parameters that the optimizer updates, see `parameter_names`."""
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    return {parameter: shapes for parameter, shapes in parameter_names(model).items() if parameter in held}


def _by_owner(tensors: Tensors) -> States:
    states: States = {}
    for full_name, tensor in tensors.items():
        owner, _, key = full_name.rpartition(".")
        states.setdefault(owner, {})[key] = _from_tensor(tensor)
    return states


def _flat(value: Any) -> torch.Tensor:
    tensor = _as_tensor(value)
    return tensor.reshape(-1) if tensor.dim() else tensor


def _as_tensor(value: torch.Tensor | float) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach()
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)


def _from_tensor(tensor: torch.Tensor) -> torch.Tensor | float:
    is_number = tensor.dim() == 0 and tensor.dtype in (torch.int64, torch.float64)
    return tensor.item() if is_number else tensor
