"""Resume a run: choose the checkpoint, check that it belongs to the recipe, restore it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from itertools import takewhile
from pathlib import Path

import torch

from lmkit.errors import UsageError
from lmkit.optim.adamw import MASTER
from lmkit.recipe import changes as rule
from lmkit.recipe.changes import differences
from lmkit.recipe.load import validate
from lmkit.recipe.run_folder import CHECKPOINTS, refuse_foreign_files
from lmkit.recipe.schema import Recipe
from lmkit.recipe.tables import OptimizerConfig
from lmkit.storage import keep_damaged, remove_partials
from lmkit.storage.outputs import refuse_unwritable
from lmkit.training.atomic_checkpoint import (
    STATE,
    Choice,
    clean_leftovers,
    newest_valid,
    saved_steps,
    verify,
)
from lmkit.training.checkpoint import Checkpoint, open_checkpoint
from lmkit.training.given_weights import WeightsOnDemand
from lmkit.training.model_state import load_masters, load_optimizer_tensors, load_weights, own_shard
from lmkit.training.state import DataIdentity, TrainingState, restore_rng
from lmkit.training.step import Step
from lmkit.training.trainer import Moment

UNREPORTED = ("run.name", "run.folder", "checkpoint", "generate", "wandb", "corpus", "tokenizer", "data")
"""Tables and keys whose differences are not reported."""


def open_folder(recipe: Recipe, hold: Callable[[], object]) -> tuple[Path | None, list[str]]:
    """On rank 0: lock the run folder, remove leftovers of a killed session, choose the checkpoint.

    Returns:
        The checkpoint, None from scratch; and lines for people.
    """
    folder, checkpoints = recipe.run.path, recipe.run.path / CHECKPOINTS
    refuse_unwritable(folder, option="--set run.folder=...")
    refuse_foreign_files(folder)
    hold()
    removed = remove_partials(folder)
    if checkpoints.is_dir():
        removed += clean_leftovers(checkpoints)
    choice = choose_start(recipe)
    return choice.path, [
        *(f"removed {left}, left by a session that was killed" for left in removed),
        *(f"skipped {why}" for why in choice.skipped),
        *(f"kept a damaged checkpoint as {place}" for place in keep_newer(checkpoints, choice)),
    ]


def choose_start(recipe: Recipe) -> Choice:
    """Find the checkpoint that `checkpoint.resume` asks for; reads it in full. `path` is None from scratch.

    Raises:
        UsageError: `never` in a folder with checkpoints, a path without checkpoint, or a checkpoint that is older
            than others of this run.
        LmkitError: there are checkpoints, but none is good.
    """
    folder = recipe.run.path / CHECKPOINTS
    wish = recipe.checkpoint.resume
    if wish == "auto":
        return newest_valid(folder)
    present = saved_steps(folder)
    if wish == "never":
        if present:
            raise UsageError(
                "resume.refused",
                f'{folder}: holds {present[-1].path.name}, but checkpoint.resume is "never"',
                hint="choose another run.name, delete the checkpoints, or resume",
            )
        return Choice(None, ())
    path = Path(wish)
    checkpoint = open_checkpoint(path)
    verify(path)
    newer = [saved for saved in present if saved.step > checkpoint.state.step]
    if newer:
        raise UsageError(
            "resume.refused",
            f"checkpoint.resume: {path} is older than {newer[-1].path} of the same run",
            hint="choose another run.name for the new branch, or delete the newer checkpoints",
        )
    return Choice(path, ())


def keep_newer(folder: Path, choice: Choice) -> list[Path]:
    """Rename the checkpoints that are newer than the chosen one, all damaged, and return their new paths.

    The steps since are made again: their checkpoints would replace the damaged ones, of which parts may be whole.
    """
    newest_first = [saved.path for saved in reversed(saved_steps(folder))] if choice.skipped else []
    return [keep_damaged(path) for path in takewhile(lambda path: path != choice.path, newest_first)]


def check_agreement(
    checkpoint: Checkpoint, recipe: Recipe, data: DataIdentity | None, world_size: int
) -> list[str]:
    """Refuse to continue with another model or other batches; return lines for people about other changes."""
    path = checkpoint.path / STATE
    old = validate(checkpoint.state.recipe, origin=str(path), resolved=True)
    changes = differences(old, recipe)
    if old.train is None:  # an imported model: no step has been made
        changes = tuple(line for line in changes if rule.is_under(line, ("model",)))
    refused = rule.refused(changes)
    allowed = [
        f"changed since that checkpoint: {line}"
        for line in changes
        if line not in refused and not rule.is_under(line, UNREPORTED)
    ]
    if checkpoint.state.data is not None and data is not None and checkpoint.state.data != data:
        refused += [
            f"data.train: another token file ({name}: {before} -> {getattr(data, name)})"
            for name, before in checkpoint.state.data
            if before != getattr(data, name)
        ]
    if refused:
        raise UsageError(
            "resume.other_recipe",
            f"{checkpoint.path}: made by another recipe: {'; '.join(refused)}",
            hint="go back to those values, or name a new run: --set run.name=...",
        )
    before, now = old.optimizer.name, recipe.optimizer.name
    if old.train is not None and not rule.keeps_state(before, now):
        allowed.append(f"optimizer.name: {now} begins without the state of {before}")
    assert recipe.train is not None
    step = checkpoint.state.step
    if lost := rule.without_effect(changes, step=step, steps=recipe.train.steps):
        raise UsageError(
            "resume.no_effect",
            f"{checkpoint.path}: the training ended at step {step}, and no step would use {'; '.join(lost)}",
            hint=f"to train on: --set train.steps=N, N above {step}; or name a new run: --set run.name=...",
        )
    ranks = checkpoint.state.world_size
    if ranks != world_size:
        plural = "s" if ranks > 1 else ""
        allowed.append(
            f"saved by {ranks} rank{plural}, resuming on {world_size}: same batches, same state, resharded"
        )
    return allowed


def restore(checkpoint: Checkpoint, step: Step, optimizer: str) -> Moment:
    """Load weights, optimizer state and this rank's generators; return the position of the run.

    Of the state of another optimizer than `optimizer`, only the masters are loaded.
    """
    state, ranks = checkpoint.state, step.ranks
    if not step.sync.load_weights(WeightsOnDemand(checkpoint.path)):
        weights = checkpoint.model_tensors()
        load_weights(step.model, weights, origin=checkpoint.path)
        load_masters(step.optimizer, step.model, weights)
    own = own_shard(step.optimizer, state.optimizer_layout)
    shards = checkpoint.all_optimizer_shards() if own is None else [checkpoint.optimizer_tensors(own)]
    before = state.recipe.get("optimizer") or {}  # an imported model has no optimizer
    if not rule.keeps_state(before.get("name", OptimizerConfig().name), optimizer):
        shards = [{n: value for n, value in shard.items() if n.endswith(f".{MASTER}")} for shard in shards]
    load_optimizer_tensors(
        step.optimizer,
        step.model,
        shards,
        state.optimizer_layout,
        origin=str(checkpoint.path),
        own=own,
    )
    restore_rng(state.rng[ranks.rank if ranks.rank < len(state.rng) else 0], ranks.device)
    step.skipped.fill_(state.skipped_in_a_row)
    if step.loss_scale is not None and state.loss_scale is not None:
        step.loss_scale.restore(state.loss_scale)
    if step.spikes is not None and state.spikes is not None:
        step.spikes.state.copy_(torch.tensor(state.spikes, dtype=torch.float64))
    return Moment(**{field.name: getattr(state, field.name) for field in fields(Moment)})


def is_finished(state: TrainingState, recipe: Recipe, stop_at_step: int | None) -> bool:
    """Return whether a checkpoint has reached the end of the run, or `stop_at_step`."""
    assert recipe.train is not None
    ends = recipe.train.steps if stop_at_step is None else min(recipe.train.steps, stop_at_step)
    time_is_up = recipe.train.max_minutes is not None and state.seconds >= recipe.train.max_minutes * 60
    return state.step >= ends or time_is_up
