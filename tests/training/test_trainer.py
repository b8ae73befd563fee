"""The training loop: its clock, and runs that are stopped by numbers that are not finite, by signals, by the disk."""

import itertools
import math
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from programs import file_size_limit
from raising import raises
from run_folders import assert_same_state, losses, newest, records, saved, train_here

from lmkit.errors import UsageError, system_error
from lmkit.parallel.ranks import Ranks
from lmkit.training import step as step_module
from lmkit.training import trainer
from lmkit.training.resume import CheckpointWriter
from lmkit.training.step import Step
from lmkit.training.trainer import Clock, Diverged
from lmkit.training.weights import weights_of


class Time:
    """Time that only the test advances."""

    now = 1000.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    for module in (trainer, step_module):
        monkeypatch.setattr(module, "time", time)
    return time


def test_the_clock_continues_from_what_earlier_sessions_used(time, monkeypatch):
    run = Clock(used_seconds=100.0, max_minutes=5.0, ranks=Ranks())
    assert run.seconds == 100.0
    time.now += 20.0
    assert (run.seconds, run.fraction()) == (120.0, pytest.approx(0.4))
    time.now += 330.0
    assert (run.seconds, run.fraction()) == (450.0, pytest.approx(1.5))
    endless = Clock(used_seconds=3.0, max_minutes=None, ranks=Ranks())
    assert (endless.seconds, endless.fraction()) == (3.0, None)

    def broadcast(tensor: torch.Tensor, *, src: int) -> None:
        assert src == 0
        tensor.fill_(0.25)

    monkeypatch.setattr(trainer, "dist", SimpleNamespace(broadcast=broadcast))
    second = Clock(used_seconds=30.0, max_minutes=1.0, ranks=Ranks(rank=1, world_size=2))
    assert second.fraction() == 0.25  # rank 0's clock counts


def test_speed_is_measured_since_the_last_read_without_excluded_time(time):
    meter = Clock(used_seconds=3.0, max_minutes=None, ranks=Ranks())
    assert meter.speed is None
    time.now += 2.0
    assert (meter.read(100), meter.speed) == (50.0, 50.0)
    time.now += 1.0
    with meter.excluded():
        time.now += 7.0
    time.now += 2.0
    assert meter.speed == 50.0  # up to the last read
    assert (meter.read(600), meter.speed) == (200.0, 140.0)
    assert meter.read(0) == 0.0  # at once: no time, no tokens


def test_fault_50_an_output_that_cannot_be_written_is_refused_before_training(tiny, tmp_path, monkeypatch):
    def never(*arguments: Any) -> None:
        raise AssertionError("a model was trained")

    monkeypatch.setattr(Step, "accumulate", never)
    (tmp_path / "file").write_text("not a folder")
    for folder in (tmp_path / "file" / "runs", Path("/proc/nothing/here")):
        with raises(UsageError, "output.unwritable", folder, hint="run.folder"):
            train_here(tiny(f'run.folder="{folder}"'))


@pytest.mark.parametrize("limit", [100, 2000])
def test_fault_49_a_limit_on_file_sizes_is_one_error_whichever_file_meets_it(limit, tiny):
    with file_size_limit(limit), pytest.raises(OSError, match="File too large") as caught:
        train_here(tiny())
    error = system_error(caught.value)
    assert error.message.startswith(f"{tiny().run.path}/")
    assert saved(tiny()) == []
    assert not list(tiny().run.path.rglob("*.lmkit-partial"))
    assert train_here(tiny()).status == "finished"


def test_a_save_starts_the_clock_anew(time, tiny, monkeypatch):
    """A step takes half a minute."""

    def half_a_minute_later(self: Step, *batch: torch.Tensor) -> torch.Tensor:
        time.now += 30.0
        return original(self, *batch)

    original = Step.accumulate
    monkeypatch.setattr(Step, "accumulate", half_a_minute_later)
    recipe = tiny("checkpoint.minutes=2", "checkpoint.interval=3", "checkpoint.keep_last=20")
    train_here(recipe)
    assert saved(recipe) == [3, 6, 9, 10]
    recipe = tiny("checkpoint.minutes=2", "checkpoint.keep_last=20", "run.name=by-the-clock")
    train_here(recipe)
    assert saved(recipe) == [4, 8, 10]


def spoil(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """Make the loss of some steps (counted from 1) NaN."""
    original, calls = Step.accumulate, iter(range(1, 1000))

    def accumulate(self: Step, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = original(self, inputs, targets)
        return loss * math.nan if next(calls) in steps else loss

    monkeypatch.setattr(Step, "accumulate", accumulate)


def test_fault_66_and_68_nan_stops_the_run_and_the_good_checkpoint_stays(tiny, monkeypatch):
    recipe = tiny("checkpoint.interval=3", "checkpoint.keep_last=1")
    spoil(monkeypatch, {10})
    with raises(Diverged, "train.nonfinite", "step 10", "loss nan"):
        train_here(recipe)
    assert saved(recipe) == [9]
    tensors = dict(weights_of(newest(recipe)))
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())


def test_nan_steps_can_be_skipped_up_to_a_limit(tiny, monkeypatch):
    recipe = tiny('train.nonfinite="skip"', "train.max_skips=2")
    spoil(monkeypatch, {3, 4, 8})
    assert train_here(recipe).status == "finished"
    assert [record["step"] for record in records(recipe, "skip")] == [3, 4, 8]
    assert [step for step, _ in losses(recipe)] == [1, 2, 5, 6, 7, 9, 10]
    spoil(monkeypatch, {3, 4, 5})
    with raises(Diverged, "train.nonfinite", "train.max_skips is 2"):
        train_here(tiny('train.nonfinite="skip"', "train.max_skips=2", "run.name=worse"))


def test_running_ahead_changes_neither_metrics_nor_checkpoints(tiny, monkeypatch):
    """Also where losses are NaN (fault 66) and the run is resumed (fault 53)."""
    options = ('train.nonfinite="skip"', "train.max_skips=2", "checkpoint.interval=6")
    whole, parts = tiny(*options, "run.name=whole"), tiny(*options, "run.name=parts")
    spoil(monkeypatch, {3, 4, 7})
    train_here(whole)
    monkeypatch.setattr(Step, "runs_ahead", True)
    spoil(monkeypatch, {3, 4, 7})
    train_here(parts, stop_at_step=6)
    spoil(monkeypatch, {1})
    assert train_here(parts).resumed_from == 6
    for kind in ("train", "skip", "valid", "final"):
        assert losses(whole, kind) == losses(parts, kind) != []
    assert_same_state(newest(whole), newest(parts))
    assert saved(whole) == saved(parts)


PLACES = {"step": (Step, "accumulate"), "evaluation": (trainer, "evaluate")}
PLACES["save"] = (CheckpointWriter, "save")


@pytest.mark.parametrize(
    ("where", "call", "steps"), [("step", 2, (2, 3)), ("evaluation", 1, (4, 4)), ("save", 1, (6, 7))]
)
@pytest.mark.parametrize(("number", "late"), [(signal.SIGTERM, False), (signal.SIGINT, True)])
def test_fault_69_a_signal_finishes_the_step_and_saves_once(
    where, call, steps, number, late, tiny, monkeypatch
):
    """The signal comes in the middle of step 2, of an evaluation, or of a save. Where steps run ahead, the next one
    is launched already when the wish is read."""
    step = steps[late]
    monkeypatch.setattr(Step, "runs_ahead", late)
    whole, recipe = tiny("run.name=whole"), tiny("run.name=stopped", "checkpoint.interval=5")
    train_here(whole)
    owner, name = PLACES[where]
    original, calls = getattr(owner, name), itertools.count(1)

    def signalled(*arguments: Any, **options: Any) -> Any:
        done = original(*arguments, **options) if where == "save" else None
        if next(calls) == call:
            os.kill(os.getpid(), number)
        return done if where == "save" else original(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, signalled)
        with pytest.raises(SystemExit if number == signal.SIGTERM else KeyboardInterrupt) as caught:
            train_here(recipe)
    if number == signal.SIGTERM:
        assert caught.value.code == 143  # type: ignore[union-attr]
    # In a save (of step 5) the signal is seen during the step after it.
    assert saved(recipe) == ([5, step] if where == "save" else [step])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert train_here(recipe).resumed_from == step
    assert_same_state(newest(whole), newest(recipe))
    assert losses(whole) == losses(recipe)
