"""Optimizer state <-> named tensors, for any `torch.optim.Optimizer`, whole or sharded over ranks.

`layers.0.ffn.w1.weight.exp_avg` is the entry `exp_avg` of the state of that parameter. A shard's tensors are
called `3.exp_avg`: of bucket 3 of the layout that the checkpoint's state describes. State moves freely between
whole and sharded optimizers and between numbers of ranks. Hyperparameters are not saved: they come from the
recipe, so that a changed learning rate takes effect.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lmkit.errors import LmkitError, UsageError
from lmkit.model.accounting import count_parameters
from lmkit.model.transformer import plain_name
from lmkit.parallel.protocol import ShardedState
from lmkit.parallel.shards import BucketLayout, ShardLayout, consolidate
from lmkit.recipe.tables import ModelConfig
from lmkit.training.checkpoint import (
    MODEL,
    STATE,
)
from lmkit.training.tensor_files import tensor_shapes

if TYPE_CHECKING:
    from lmkit.model.transformer import TransformerLM
    from lmkit.training.checkpoint import Checkpoint


log = logging.getLogger("lmkit")


def load_weights(model: nn.Module, tensors: Mapping[str, torch.Tensor], *, origin: Path) -> None:
    """Copy saved weights into a model, plain, compiled or wrapped, whatever it was saved from.

    Raises:
        UsageError: other names or shapes; the message lists the first differences.
    """
    wanted = _plain_state(model)
    wrong = [
        f"{name}: saved {_shape(tensors.get(name))}, model {_shape(wanted.get(name))}"
        for name in [*wanted, *(name for name in tensors if name not in wanted)]
        if _shape(tensors.get(name)) != _shape(wanted.get(name))
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise UsageError(
            f"{origin}: weights of another model: {'; '.join(wrong[:3])}{more}",
            hint="use the recipe that the checkpoint was made with",
        )
    # By storage, because tied weights have several names and are saved under one.
    saved = {id(tensor): tensors[name] for name, tensor in wanted.items()}
    state = model.state_dict(keep_vars=True)
    model.load_state_dict({name: saved[id(tensor)] for name, tensor in state.items()})


def _shape(tensor: torch.Tensor | None) -> str:
    return "missing" if tensor is None else "x".join(map(str, tensor.shape)) or "scalar"


def model_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The live weights by plain name; tied ones once. Waits for weights that are still being gathered."""
    return {name: tensor.detach() for name, tensor in _plain_state(model).items()}


def _plain_state(model: nn.Module) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            state[plain_name(name)] = tensor
    return state


def plain_model(checkpoint: Checkpoint, *, device: torch.device | str) -> TransformerLM:
    """The model of a checkpoint, neither compiled nor wrapped, in eval mode.

    One that was trained with `flash_triton` runs with `sdpa` on a CPU, and the log says so.
    """
    from lmkit.model.transformer import TransformerLM

    config = checkpoint.state.model
    tensors = checkpoint.model_tensors()
    _check_size(config, tensors, origin=checkpoint.path)
    if config.attention == "flash_triton" and torch.device(device).type == "cpu":
        log.warning("trained with attention flash_triton, which needs a GPU: using sdpa on this CPU")
        config = config.model_copy(update={"attention": "sdpa"})
    model = TransformerLM(config, device=device)
    load_weights(model, tensors, origin=checkpoint.path / MODEL)
    return model.eval()


def check_weights(checkpoint: Checkpoint) -> None:
    """Refuse weights that are not those of the checkpoint's model; reads their names and shapes only.

    Raises:
        UsageError, LmkitError: as `load_weights`, and another number of parameters.
    """
    from lmkit.model.transformer import TransformerLM

    path, config = checkpoint.path, checkpoint.state.model
    shapes = tensor_shapes(path / MODEL)
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    _check_size(config, tensors, origin=path)
    model = TransformerLM(config.model_copy(update={"attention": "sdpa"}), device="meta")
    load_weights(model, tensors, origin=path / MODEL)


def _check_size(config: ModelConfig, tensors: Mapping[str, torch.Tensor], *, origin: Path) -> None:
    """Refuse before memory is taken for a model that the weights cannot fill."""
    if config.vocab_size is None:
        raise LmkitError(f"{origin / STATE}: model.vocab_size is missing", hint="use another checkpoint")
    wanted, saved = count_parameters(config).total, sum(tensor.numel() for tensor in tensors.values())
    if wanted != saved:
        raise LmkitError(
            f"{origin / MODEL}: holds {saved} parameters, the model in {STATE} has {wanted}",
            hint="copy the whole checkpoint folder again, or use another one",
        )


Tensors = Mapping[str, torch.Tensor]


Layout = dict[str, Any]


States = dict[str, dict[str, Any]]
"""parameter or bucket -> name of the state -> value"""


MASTER = "master"
"""The fp32 weights behind bf16 ones, kept by a sharded optimizer."""


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's live state tensors by name. Python numbers become scalar tensors (int64, float64)."""
    if isinstance(optimizer, ShardedState):
        states = optimizer.state_dict()["state"]
    else:
        states = {
            name: optimizer.state[parameter]
            for name, parameter in _held(optimizer, model).items()
            if parameter in optimizer.state
        }
    return {
        f"{name}.{key}": _as_tensor(value) for name, state in states.items() for key, value in state.items()
    }


def optimizer_layout(optimizer: torch.optim.Optimizer) -> Layout | None:
    """How the state is cut into shards, as JSON; None if every rank holds all of it."""
    return optimizer.shard_layout.as_json() if isinstance(optimizer, ShardedState) else None


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    shards: Sequence[Tensors],
    layout: Layout | None,
    *,
    origin: str,
) -> None:
    """Put saved state back, into an optimizer that may be sharded otherwise than the saved one.

    Args:
        shards, layout: of the checkpoint: of all its ranks, or one part without a layout.
        origin: the checkpoint, for errors.

    Raises:
        LmkitError: the state belongs to other parameters.
    """
    grouped = [_by_owner(shard) for shard in shards]
    try:
        if isinstance(optimizer, ShardedState):
            _load_into_shards(optimizer, model, grouped, layout)
        else:
            whole = grouped[0] if layout is None else consolidate(_shard_states(grouped, layout, groups=0))
            _load_into_whole(optimizer, model, whole)
    # Layouts are free-form JSON.
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise LmkitError(
            f"{origin}: optimizer state: {error}", hint="the checkpoint belongs to another model or optimizer"
        ) from error


def _load_into_shards(
    optimizer: ShardedState, model: nn.Module, grouped: list[States], layout: Layout | None
) -> None:
    if layout is None:
        # Whole state is the state of one rank whose buckets hold one parameter each.
        sizes = {name: parameter.numel() for name, parameter in _named_parameters(model).items()}
        names = [name for name in grouped[0] if name in sizes]
        buckets = tuple(BucketLayout(0, (name,), (sizes[name],), sizes[name]) for name in names)
        layout = ShardLayout(1, buckets).as_json()
        flat = {
            str(index): {key: _flat(value) for key, value in grouped[0][name].items()}
            for index, name in enumerate(names)
        }
        grouped = [flat]
    optimizer.load_resharded(_shard_states(grouped, layout, groups=len(optimizer.param_groups)))


def _shard_states(grouped: Sequence[States], layout: Layout, *, groups: int) -> list[dict[str, Any]]:
    """State dicts as `ShardedState` makes them; groups without entries change no hyperparameter."""
    return [
        {"rank": rank, "layout": layout, "state": states, "param_groups": [{}] * groups}
        for rank, states in enumerate(grouped)
    ]


def _load_into_whole(optimizer: torch.optim.Optimizer, model: nn.Module, whole: States) -> None:
    held = _held(optimizer, model)
    unknown = sorted(set(whole) - set(held))
    if unknown:
        raise ValueError(f"unknown parameters {', '.join(unknown[:3])}")
    for name, state in whole.items():
        parameter = held[name]
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.numel() != parameter.numel():
                raise ValueError(
                    f"{name}.{key} has {value.numel()} elements, the parameter {parameter.numel()}"
                )
        if MASTER in state:
            with torch.no_grad():
                parameter.copy_(state[MASTER].view_as(parameter))
        optimizer.state[parameter] = {
            key: _restored(value, parameter) for key, value in state.items() if key != MASTER
        }


def _restored(value: Any, parameter: torch.Tensor) -> Any:
    """A saved value as the optimizer keeps it: on the parameter's device and in its shape; scalars as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.clone() if value.dim() == 0 else value.view_as(parameter).to(parameter.device, copy=True)


def _held(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, torch.Tensor]:
    """Name -> parameter, for those that the optimizer works on."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {name: parameter for name, parameter in _named_parameters(model).items() if id(parameter) in held}


def _named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {plain_name(name): parameter for name, parameter in model.named_parameters()}


def _by_owner(tensors: Tensors) -> States:
    states: States = {}
    for full_name, tensor in tensors.items():
        owner, _, key = full_name.rpartition(".")
        states.setdefault(owner, {})[key] = _from_tensor(tensor)
    return states


def _flat(value: Any) -> torch.Tensor:
    tensor = value if isinstance(value, torch.Tensor) else _as_tensor(value)
    return tensor.reshape(-1) if tensor.dim() else tensor


def _as_tensor(value: torch.Tensor | float) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach()
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)


def _from_tensor(tensor: torch.Tensor) -> torch.Tensor | float:
    is_number = tensor.dim() == 0 and tensor.dtype in (torch.int64, torch.float64)
    return tensor.item() if is_number else tensor
