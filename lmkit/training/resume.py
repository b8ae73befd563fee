"""Going on where a run left off: which checkpoint, whether it belongs to this recipe, and putting it all back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lmkit.errors import UsageError
from lmkit.parallel.protocol import ShardedState
from lmkit.parallel.ranks import Ranks
from lmkit.recipe.load import differences, validate
from lmkit.recipe.schema import Recipe
from lmkit.training.checkpoint import (
    CHECKPOINTS,
    STATE,
    Checkpoint,
    newest_valid,
    open_checkpoint,
    saved_steps,
    verify,
)
from lmkit.training.model_state import load_optimizer_tensors, load_weights
from lmkit.training.state import DataIdentity, TrainingState, restore_rng
from lmkit.training.trainer import Moment, Parts

BATCHES = ("data.source", "data.sampling")
"""What of [data] decides which batches come. The rest of it says where files lie; they are compared by content."""

MUST_AGREE = ("run.seed", "model", *BATCHES, "train.batch_size", "train.precision")
"""What a resumed run may not change: the weights would not fit, or steps would not follow from one another.
Everything else may change (a new learning rate, more steps, other intervals, more ranks), and is reported."""

MAY_CHANGE_WITHIN = ("model.preset", "model.attention", "model.activation_checkpointing", "model.compile")
"""Inside those tables: other ways to compute the same function."""

UNREPORTED = ("run.name", "run.folder", "checkpoint", "generate", "wandb", "corpus", "tokenizer", "data")
"""Not worth a line when they differ, `BATCHES` apart."""


@dataclass(frozen=True)
class StartingPoint:
    """Where a session begins.

    Attributes:
        checkpoint: None: from scratch.
        notes: lines for people, on what was found.
    """

    checkpoint: Path | None
    notes: tuple[str, ...]


def choose_start(recipe: Recipe) -> StartingPoint:
    """Find the checkpoint that `checkpoint.resume` asks for; reads it in full.

    Raises:
        UsageError: `never` in a folder with checkpoints, or a path that holds none, or that would leave newer
            checkpoints of this run behind.
        LmkitError: there are checkpoints, but none is good.
    """
    folder = recipe.run.path / CHECKPOINTS
    wish = recipe.checkpoint.resume
    if wish == "auto":
        choice = newest_valid(folder)
        skipped = tuple(f"skipped {reason}" for reason in choice.skipped)
        if choice.path is None:
            return StartingPoint(None, ())
        return StartingPoint(choice.path, skipped)
    present = saved_steps(folder)
    if wish == "never":
        if present:
            raise UsageError(
                f'{folder}: holds {present[-1].path.name}, but checkpoint.resume is "never"',
                hint="choose another --name, delete the checkpoints, or resume",
            )
        return StartingPoint(None, ())
    path = Path(wish)
    checkpoint = open_checkpoint(path)
    verify(path)
    newer = [saved for saved in present if saved.step > checkpoint.state.step]
    if newer:
        raise UsageError(
            f"checkpoint.resume: {path} is older than {newer[-1].path} of the same run",
            hint="choose another --name for the new branch, or delete the newer checkpoints",
        )
    return StartingPoint(path, ())


def check_agreement(checkpoint: Checkpoint, recipe: Recipe, data: DataIdentity | None) -> tuple[str, ...]:
    """Refuse to go on with another model or other batches; return lines about what else has changed.

    Args:
        recipe: resolved (with the vocabulary size).

    Raises:
        UsageError: naming every difference.
    """
    path = checkpoint.path / STATE
    old = validate(checkpoint.state.recipe, origin=str(path), resolved=True)
    changed = [
        line
        for line in differences(old, recipe)
        if _is_under(line, BATCHES) or not _is_under(line, UNREPORTED)
    ]
    refused = [
        line for line in changed if _is_under(line, MUST_AGREE) and not _is_under(line, MAY_CHANGE_WITHIN)
    ]
    if checkpoint.state.data is not None and data is not None and checkpoint.state.data != data:
        refused += [
            f"data.train: another token file ({name}: {before} -> {getattr(data, name)})"
            for name, before in checkpoint.state.data
            if before != getattr(data, name)
        ]
    if refused:
        raise UsageError(
            f"{checkpoint.path}: made by another recipe: {'; '.join(refused)}",
            hint="go back to those values, or start a new run with another --name",
        )
    return tuple(f"changed since that checkpoint: {line}" for line in changed if line not in refused)


def world_change(checkpoint: Checkpoint, ranks: Ranks) -> tuple[str, ...]:
    """A line for people when the number of ranks is not the one that saved the checkpoint."""
    before = checkpoint.state.world_size
    if before == ranks.world_size:
        return ()
    return (
        f"saved by {before} rank{'s' if before > 1 else ''}, going on with {ranks.world_size}: the same batches and "
        "the same state, cut anew",
    )


def _is_under(line: str, keys: tuple[str, ...]) -> bool:
    """Whether a difference (`model.d_model: 64 -> 128`) concerns one of these tables or keys."""
    name = line.partition(":")[0]
    return any(name == key or name.startswith(f"{key}.") for key in keys)


def restore(checkpoint: Checkpoint, parts: Parts) -> Moment:
    """Load weights, optimizer state and this rank's RNG; return the moment to go on from."""
    state, ranks = checkpoint.state, parts.ranks
    weights = checkpoint.model_tensors()
    load_weights(parts.model, weights, origin=checkpoint.path)
    if isinstance(parts.optimizer, ShardedState):
        parts.optimizer.load_masters(weights)
    load_optimizer_tensors(
        parts.optimizer,
        parts.model,
        checkpoint.all_optimizer_shards(),
        state.optimizer_layout,
        origin=str(checkpoint.path),
    )
    restore_rng(state.rng[ranks.rank if ranks.rank < len(state.rng) else 0], ranks.device)
    if parts.step.loss_scale is not None and state.loss_scale is not None:
        parts.step.loss_scale.restore(state.loss_scale)
    return Moment(
        step=state.step,
        tokens=state.tokens,
        skipped_in_a_row=state.skipped_in_a_row,
        best_loss=state.best_loss,
    )


def is_finished(state: TrainingState, recipe: Recipe, stop_at_step: int | None) -> bool:
    """Whether a checkpoint is already at the end that is asked for."""
    assert recipe.train is not None
    ends = recipe.train.steps if stop_at_step is None else min(recipe.train.steps, stop_at_step)
    time_is_up = recipe.train.max_minutes is not None and state.seconds >= recipe.train.max_minutes * 60
    return state.step >= ends or time_is_up
