"""Time that only the test advances."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lmkit.parallel.ranks import Ranks
from lmkit.training import trainer as clock
from lmkit.training.trainer import Speedometer, TrainingClock


class Time:
    now = 1000.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(clock, "time", time)
    return time


def test_a_run_goes_on_from_what_earlier_sessions_used(time: Time) -> None:
    run = TrainingClock(used_seconds=100.0, max_minutes=5.0, ranks=Ranks())
    assert (run.seconds, run.seconds_left) == (100.0, 200.0)
    time.now += 20.0
    assert (run.seconds, run.seconds_left) == (120.0, 180.0)
    assert run.fraction() == pytest.approx(0.4)
    time.now += 330.0
    assert (run.seconds, run.seconds_left) == (450.0, 0.0)
    assert run.fraction() == pytest.approx(1.5)


def test_without_a_limit_nothing_is_left_or_used_up(time: Time) -> None:
    run = TrainingClock(used_seconds=3.0, max_minutes=None, ranks=Ranks())
    time.now += 4.0
    assert (run.seconds, run.seconds_left, run.fraction()) == (7.0, None, None)


def test_the_first_ranks_clock_counts(time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    def broadcast(tensor: torch.Tensor, *, src: int) -> None:
        assert src == 0
        tensor.fill_(0.25)

    monkeypatch.setattr(clock, "dist", SimpleNamespace(broadcast=broadcast))
    run = TrainingClock(used_seconds=30.0, max_minutes=1.0, ranks=Ranks(rank=1, world_size=2))
    assert run.fraction() == 0.25


def test_speed_is_of_the_time_since_the_last_reading(time: Time) -> None:
    meter = Speedometer()
    assert meter.session is None
    meter.count(60)
    meter.count(40)
    time.now += 2.0
    assert meter.read() == 50.0
    assert meter.session == 50.0
    meter.count(600)
    time.now += 3.0
    assert meter.session == 50.0  # up to the last reading
    assert meter.read() == 200.0
    assert meter.session == 140.0
    assert meter.read() == 0.0  # at once: no time, no tokens


def test_time_that_is_excluded_does_not_count(time: Time) -> None:
    meter = Speedometer()
    for seconds in (7.0, 11.0):
        meter.count(100)
        time.now += 1.0
        with meter.excluded():
            time.now += seconds
    time.now += 2.0
    assert meter.read() == 50.0
    assert meter.session == 50.0
