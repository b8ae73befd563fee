"""Helpers of the tests: a model of 7,000 parameters, trainings in this process, what run folders hold."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lmkit.recipe.recipe import Recipe
from lmkit.recipe.tables import ModelConfig
from lmkit.training.checkpoint import Checkpoint, TrainingState, capture_rng, open_checkpoint, saved_steps
from lmkit.training.metrics import read_metrics
from lmkit.training.session import TrainResult
from lmkit.training.session import train as train_here
from lmkit.training.weights import weights_of

# The fixture `tiny`.
Tiny = Callable[..., Recipe]
CONFIG = ModelConfig(vocab_size=64, context_length=8, d_model=16, d_ff=32, num_layers=1, num_heads=2)
# Documents end at one of 64 equally likely tokens: some are longer than a row, some have one token.
PACKED = ('data.sampling="packed"',)


def assert_resumes_exactly(
    whole: Recipe, *, stops: Sequence[int] = (5,), of: Sequence[str] = ("train", "valid", "final")
) -> tuple[TrainResult, Recipe]:
    """Train in one go and in parts: the same state and losses, bit for bit. Returns the result of the whole run, and
    the recipe of the parts."""
    parts = whole.changed(run={"name": f"{whole.run.name}-in-parts"})
    result = train_here(whole)
    for stop in stops:
        first = train_here(parts, stop_at_step=stop)
        assert (first.status, first.step) == ("stopped early", stop)
    second = train_here(parts)
    assert (second.status, second.resumed_from) == ("finished", stops[-1])
    assert_same_state(newest(whole), newest(parts))
    assert all(losses(whole, kind) == losses(parts, kind) != [] for kind in of)
    return result, parts


def records(recipe: Recipe, kind: str = "train") -> list[dict[str, Any]]:
    found = read_metrics(recipe.run.path / "metrics.jsonl")
    return [record for record in found if record["kind"] == kind]


def losses(recipe: Recipe, kind: str = "train") -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in records(recipe, kind)]


def newest(recipe: Recipe) -> Checkpoint:
    return open_checkpoint(saved_steps(recipe.run.path / "checkpoints")[-1].path)


def make_state(step: int, **fields: object) -> TrainingState:
    facts = {"lmkit": "0", "step": step, "seconds": 1.5, "tokens": 10, "world_size": 1, "strategy": "none"}
    facts |= {"optimizer_shards": 1, "rng": (capture_rng(torch.device("cpu")),), "recipe": {}}
    facts |= {"model": ModelConfig(vocab_size=300), "recipe_sha256": ""}
    return TrainingState(**{**facts, **fields})


def saved(recipe: Recipe) -> list[int]:
    return [item.step for item in saved_steps(recipe.run.path / "checkpoints")]


def assert_same_tensors(left: Checkpoint, right: Checkpoint) -> None:
    """Bit for bit: weights and all shards of the optimizer state."""
    assert left.state.step == right.state.step
    pairs = [(dict(weights_of(left)), dict(weights_of(right)))]
    pairs += zip(left.all_optimizer_shards(), right.all_optimizer_shards(), strict=True)
    for mine, yours in pairs:
        assert mine.keys() == yours.keys()
        for name, tensor in mine.items():
            assert torch.equal(tensor, yours[name]), name


def assert_same_state(left: Checkpoint, right: Checkpoint) -> None:
    """Bit for bit: tensors, generators, and the position of the run."""
    assert_same_tensors(left, right)
    assert left.state.rng == right.state.rng
    for field in ("tokens", "skipped_in_a_row", "valid_loss", "best_loss", "loss_scale"):
        assert getattr(left.state, field) == getattr(right.state, field), field
