"""What tests read from run folders."""

from __future__ import annotations

import torch

from lmkit.recipe.schema import Recipe
from lmkit.training import session
from lmkit.training.checkpoint import Checkpoint, open_checkpoint, saved_steps
from lmkit.training.metrics import read_metrics


def train_here(recipe: Recipe, *, stop_at_step: int | None = None) -> session.TrainResult:
    result = session.train(recipe, stop_at_step=stop_at_step)
    assert result is not None
    return result


def losses(recipe: Recipe, kind: str = "train") -> list[tuple[int, float]]:
    records = read_metrics(recipe.run.path / "metrics.jsonl")
    return [(record["step"], record["loss"]) for record in records if record["kind"] == kind]


def newest(recipe: Recipe) -> Checkpoint:
    return open_checkpoint(saved_steps(recipe.run.path / "checkpoints")[-1].path)


def saved(recipe: Recipe) -> list[int]:
    return [item.step for item in saved_steps(recipe.run.path / "checkpoints")]


def assert_same_state(left: Checkpoint, right: Checkpoint) -> None:
    """Bit for bit: weights, optimizer state, generators, and where the run stands."""
    for mine, yours in (
        (left.model_tensors(), right.model_tensors()),
        (left.optimizer_tensors(), right.optimizer_tensors()),
    ):
        assert mine.keys() == yours.keys()
        for name, tensor in mine.items():
            assert torch.equal(tensor, yours[name]), name
    assert left.state.rng == right.state.rng
    for field in ("step", "tokens", "skipped_in_a_row", "valid_loss", "best_loss", "loss_scale"):
        assert getattr(left.state, field) == getattr(right.state, field), field
