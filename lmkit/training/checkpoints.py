"""Loading checkpoints: into a run that goes on, or as a plain model to generate and evaluate with."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from lmkit.errors import LmkitError, UsageError
from lmkit.model.accounting import count_parameters
from lmkit.model.names import plain_name
from lmkit.recipe.model import ModelConfig
from lmkit.recipe.run import RunConfig
from lmkit.training.checkpoint_folder import (
    MANIFEST,
    MODEL,
    STATE,
    Choice,
    newest_valid,
    read_manifest,
    saved_steps,
    shard_name,
)
from lmkit.training.state import TrainingState, parse_state
from lmkit.training.tensor_files import FileEntry, parse_tensors, read_verified, tensor_shapes

if TYPE_CHECKING:
    from lmkit.model.transformer import TransformerLM

log = logging.getLogger("lmkit")

CHECKPOINTS = "checkpoints"
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest and state were read; tensors are read, and verified, when asked for."""

    path: Path
    state: TrainingState
    entries: Mapping[str, FileEntry]

    def model_tensors(self) -> dict[str, torch.Tensor]:
        """Weights by plain parameter name, on the CPU, in memory of their own."""
        return self._tensors(MODEL)

    def optimizer_tensors(self, shard: int = 0) -> dict[str, torch.Tensor]:
        """One shard of the optimizer state (the whole state where it was not sharded)."""
        return self._tensors(shard_name(shard, self.state.optimizer_shards))

    def all_optimizer_shards(self) -> list[dict[str, torch.Tensor]]:
        """Every rank's shard, in the order of the ranks."""
        return [self.optimizer_tensors(rank) for rank in range(self.state.optimizer_shards)]

    def _tensors(self, name: str) -> dict[str, torch.Tensor]:
        path = self.path / name
        return parse_tensors(read_verified(path, self.entries[name]), path=path)


def open_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint's manifest and state.

    Raises:
        LmkitError: damaged, incomplete (an optimizer shard is missing, say), or of a newer format.
        UsageError: not a checkpoint folder.
    """
    if not (path / MANIFEST).is_file() and not (path / MODEL).is_file():
        raise UsageError(
            f"{path}: not a checkpoint folder (no {MANIFEST})",
            hint="a checkpoint is a folder like <run>/checkpoints/step-00000100",
        )
    entries = read_manifest(path)
    state = parse_state(read_verified(path / STATE, entries[STATE]), path=path / STATE)
    for rank in range(state.optimizer_shards):
        name = shard_name(rank, state.optimizer_shards)
        if name not in entries or not (path / name).is_file():
            raise LmkitError(
                f"{path / name}: missing, the optimizer state of rank {rank}",
                hint="copy the whole checkpoint folder, or use an older one",
            )
    return Checkpoint(path, state, entries)


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


def find_checkpoint(path: Path) -> Choice:
    """The checkpoint that a run folder or a checkpoint folder stands for.

    Raises:
        UsageError: there is none.
        LmkitError: there are some, but none is good.
    """
    if not path.is_dir():
        otherwise = "name a run folder (artifacts/runs/...) or a checkpoint"
        raise UsageError(f"{path}: no such folder", hint=hint_at_run(path, otherwise=otherwise))
    if (path / MANIFEST).exists() or (path / STATE).exists():
        return Choice(path, ())
    folder = path if path.name == CHECKPOINTS else path / CHECKPOINTS
    if not saved_steps(folder):
        raise UsageError(f"{path}: holds no checkpoint", hint="train first: lmkit train, or lmkit run")
    return newest_valid(folder)


def hint_at_run(path: Path, *, otherwise: str) -> str:
    """For a path that is not there: the run folder of that name, if recipes that set no `run.folder` made one."""
    run = RunConfig().folder / path
    return f"did you mean {run}?" if run.is_dir() else otherwise


def newest_checkpoint(path: Path) -> Checkpoint:
    """Open what `find_checkpoint` finds; newer ones that are damaged are named in the log.

    Raises:
        UsageError, LmkitError: as `find_checkpoint` and `open_checkpoint`.
    """
    choice = find_checkpoint(path)
    for reason in choice.skipped:
        log.warning("skipped %s", reason)
    assert choice.path is not None
    return open_checkpoint(choice.path)


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


def run_tokenizer(checkpoint: Path) -> Path | None:
    """`tokenizer.json` of the run that a checkpoint lies in."""
    tokenizer = checkpoint.resolve().parent.parent / TOKENIZER
    return tokenizer if tokenizer.is_file() else None
