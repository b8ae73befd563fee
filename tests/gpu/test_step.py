"""The whole training step on a GPU: nothing waits for it, and the device decides."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path

import pytest
import torch

from lmkit.data.batches import RandomTokens
from lmkit.recipe.load import load_recipe
from lmkit.recipe.tables import ModelConfig
from lmkit.training import session
from lmkit.training.setup import build_step
from lmkit.training.step import Step

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
run_folders = importlib.import_module("run_folders")

pytestmark = pytest.mark.gpu

CONFIG = ModelConfig(vocab_size=256, context_length=64, d_model=128, d_ff=256, num_layers=2, num_heads=2)
BATCHES = RandomTokens(256, batch_size=8, context_length=64, seed=0, accumulation=2)
PRECISIONS = ["fp32", "bf16", "fp16"]


def batch(number):
    return [tensor.cuda() for tensor in BATCHES.batch(number)]


def make_step(**options):
    torch.manual_seed(0)
    return build_step(CONFIG, **options)


# The mode is a prototype, PyTorch says.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_step_never_waits_for_the_gpu(precision):
    step = make_step(precision=precision, max_skips=0)
    assert step.runs_ahead
    batches = [batch(number) for number in range(6)]
    for number in range(3):
        step(*batches[number], lr=1e-3)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(400_000_000)
        outcomes = [step(*batches[number], lr=1e-3 / (number + 1)) for number in range(3, 6)]
        assert not torch.cuda.current_stream().query(), "the host has waited for the sleep"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(outcome.applied for outcome in outcomes)
    assert all(outcome.loss.item() == outcome.losses.item() for outcome in outcomes)
    assert len({outcome.loss.item() for outcome in outcomes}) == 3


def test_nan_changes_nothing_on_the_device_and_neither_do_the_steps_launched_after_it():
    step, expected = make_step(max_skips=1), make_step()
    outcomes = []
    for number, factor in enumerate([1.0, math.nan, 1.0, math.nan, math.nan, 1.0, 1.0]):
        outcomes.append(step.update(step.accumulate(*batch(number)) * factor, lr=1e-3))
        if number in (0, 2):
            expected(*batch(number), lr=1e-3)
    found = [(outcome.applied, outcome.nonfinite) for outcome in outcomes]
    good, bad, over = (True, False), (False, True), (False, False)
    assert found == [good, bad, good, bad, bad, over, over]
    for ours, theirs in zip(step.model.parameters(), expected.model.parameters(), strict=True):
        # Sums by atomics in the backward pass differ in their order; Adam's two updates are of 1e-3.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
        assert step.optimizer.state[ours]["step"].item() == 2


def recipe(folder, name, *more):
    return load_recipe(
        None,
        [
            f'run.folder="{folder}"',
            f"run.name={name}",
            "run.device=cuda",
            "run.deterministic=true",
            "data.source=random",
            "model.vocab_size=256",
            "model.context_length=64",
            "model.d_model=128",
            "model.d_ff=256",
            "model.num_layers=2",
            "model.num_heads=2",
            "train.steps=10",
            "train.batch_size=8",
            "train.accumulation=2",
            "train.log_interval=1",
            'train.nonfinite="skip"',
            "optimizer.warmup_steps=2",
            *more,
        ],
    )


def spoil(monkeypatch, steps):
    """Make the loss of some steps (counted from 1) NaN; the host does not wait."""
    original, calls = Step.accumulate, iter(range(1, 1000))
    monkeypatch.setattr(
        Step,
        "accumulate",
        lambda self, *batch: original(self, *batch) * (math.nan if next(calls) in steps else 1.0),
    )


@pytest.mark.parametrize("precision", PRECISIONS)
def test_runs_that_run_ahead_are_the_runs_that_wait_and_resume_bit_for_bit(precision, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "draw_losses", lambda *arguments, **options: None)

    def run(name, *more, **options):
        chosen = recipe(tmp_path, name, f"train.precision={precision}", *more)
        run_folders.train_here(chosen, **options)
        return chosen

    with monkeypatch.context() as patch:
        spoil(patch, {3, 8})
        ahead = run("ahead")
    with monkeypatch.context() as patch:
        spoil(patch, {3, 8})
        patch.setattr(Step, "runs_ahead", False)
        waiting = run("waiting")
    others = [waiting]
    for first in (1, 5, 9):
        with monkeypatch.context() as patch:
            spoil(patch, {3, 8})
            run(f"parts{first}", stop_at_step=first)
        with monkeypatch.context() as patch:
            spoil(patch, {3 - first, 8 - first})
            others.append(run(f"parts{first}"))
    for other in others:
        for kind in ("train", "skip"):
            assert run_folders.losses(ahead, kind) == run_folders.losses(other, kind)
        assert len(run_folders.losses(other)) == 8
        run_folders.assert_same_state(run_folders.newest(ahead), run_folders.newest(other))
