import random
import time

import pytest
import torch

from lmkit.measure import timing
from lmkit.measure.timing import Clock, SteadyStateClock, cache_bytes, time_variants


class FakeMachine:
    """A clock that only the work advances, with a start-up cost, drift and jitter on demand."""

    def __init__(self, *, jitter: float = 0.0, drift_per_call: float = 0.0) -> None:
        self.seconds = 0.0
        self.calls: list[str] = []
        self._jitter = jitter
        self._drift = drift_per_call
        self._rng = random.Random(3)
        self.clock = Clock(now=lambda: self.seconds)

    def work(self, name: str, milliseconds: float, *, first_call_ms: float = 0.0):
        def call() -> None:
            extra = first_call_ms if name not in self.calls else 0.0
            self.calls.append(name)
            factor = self._rng.lognormvariate(0.0, self._jitter) * (1.0 + self._drift * len(self.calls))
            self.seconds += (milliseconds * factor + extra) / 1e3

        return call

    def time(self, variants: dict[str, float], **options):
        """Time work of these milliseconds."""
        work = {name: self.work(name, milliseconds) for name, milliseconds in variants.items()}
        return time_variants(work, **{"clock": self.clock, "warmup": 0, **options})


@pytest.fixture
def machine():
    return FakeMachine()


def test_a_known_duration_is_measured_exactly_and_warm_up_is_left_out(machine):
    variants = {"a": machine.work("a", 2.0, first_call_ms=500.0), "b": machine.work("b", 3.0)}
    timings = time_variants(variants, repeats=7, warmup=1, clock=machine.clock)
    assert list(timings) == ["a", "b"]
    assert timings["a"].samples_ms == pytest.approx([2.0] * 7)
    assert timings["b"].samples_ms == pytest.approx([3.0] * 7)
    assert (timings["a"].clock, timings["a"].cache) == ("perf_counter", "warm")


def test_rounds_are_interleaved_and_their_order_changes(machine):
    machine.time(dict.fromkeys("abc", 1.0), repeats=20)
    rounds = [tuple(machine.calls[start : start + 3]) for start in range(0, 60, 3)]
    assert all(sorted(one_round) == ["a", "b", "c"] for one_round in rounds)
    assert len(set(rounds)) > 2


def test_short_work_is_repeated_within_a_sample(machine):
    timing = machine.time({"a": 0.01}, repeats=3, min_sample_ms=1.0)["a"]
    assert timing.calls_per_sample == pytest.approx(100, abs=1)  # 1 ms / 0.01 ms, rounded up
    assert timing.samples_ms == pytest.approx([0.01] * 3)


def test_the_wall_clock_begins_and_ends_with_an_idle_device():
    events: list[str] = []
    now = iter([1.0, 3.0])
    clock = Clock(now=lambda: events.append("clock") or next(now), synchronize=lambda: events.append("idle"))
    sample = clock.sample_ms(lambda: events.append("call"), 2, before=[lambda: events.append("prepare")])
    assert events == ["prepare", "idle", "clock", "call", "call", "idle", "clock"]
    assert sample == 2000.0


def test_a_cold_cache_is_flushed_before_every_sample_outside_the_clock(machine):
    flushed = []

    class Flushed(Clock):
        def sample_ms(self, work, calls, *, before):
            (flush,) = before
            flushed.append((calls, flush().numel()))
            return machine.clock.sample_ms(work, calls, before=())

    timing = machine.time({"a": 1.0}, repeats=4, cold_cache=True, clock=Flushed())["a"]
    assert timing.cache == "cold"
    assert flushed == [(1, cache_bytes("cpu"))] * 4
    assert flushed[0][1] >= 32 * 2**20  # more than a cache
    assert timing.samples_ms == pytest.approx([1.0] * 4)


def test_preparation_is_untimed_and_precedes_every_call(machine):
    prepare = {"backward": machine.work("forward", 70.0)}
    timings = machine.time({"backward": 2.0}, prepare=prepare, repeats=3, warmup=1, min_sample_ms=10.0)
    assert timings["backward"].samples_ms == pytest.approx([2.0] * 3)
    assert machine.calls == ["forward", "backward"] * 4


def test_the_time_limit_ends_with_a_whole_round(machine):
    timings = machine.time(dict.fromkeys("abc", 1.0), repeats=50, max_seconds=0.0)
    assert [len(timing.samples_ms) for timing in timings.values()] == [1, 1, 1]


def test_who_is_asked_for_the_last_round_is_asked_after_each(machine):
    answers = iter([False, False, True])

    def is_last(of_round: dict[str, float]) -> bool:
        assert of_round == pytest.approx({"a": 1.0, "b": 1.0})
        machine.calls.append("asked")
        return next(answers)

    timings = machine.time({"a": 1.0, "b": 1.0}, repeats=9, after_round=is_last)
    assert [len(timing.samples_ms) for timing in timings.values()] == [3, 3]
    assert [number for number, call in enumerate(machine.calls) if call == "asked"] == [2, 5, 8]


def test_a_slow_variant_sits_out_rounds_and_still_meets_the_others(machine, monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: machine.seconds)  # shares are counted on the host's clock
    durations = {"fast": 1.0, "slow": 200.0, "slower": 900.0}
    # One second each; what a verdict needs may take three.
    timings = machine.time(durations, repeats=32, warmup=10, max_seconds=3.0, share_seconds=True)
    counts = {name: len(timing.samples_ms) for name, timing in timings.items()}
    assert counts == {"fast": 32, "slow": 8, "slower": 2}  # every, every 4th (1.6 s), every 16th round
    assert timings["slow"].rounds == (0, 4, 8, 12, 16, 20, 24, 28)
    assert timings["slower"].rounds == (0, 16)
    ratio = timings["fast"].versus(timings["slow"])
    assert (ratio.pairs, ratio.verdict) == (8, "faster")
    assert ratio.speedup == pytest.approx(200.0)
    assert timings["slower"].versus(timings["slow"]).pairs == 2
    # Warm-up ends after half a share: ten calls of the fast one, three of 200 ms, one of 900 ms.
    assert [machine.calls.count(name) for name in durations] == [10 + 1 + 32, 3 + 1 + 8, 1 + 1 + 2]


def test_the_clock_leaves_out_the_first_steps(monkeypatch):
    """Half as many steps of lead-in, then three timed ones; preparations come before all of them."""
    calls: list[str] = []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: calls.append("clock") or len(calls))
    clock = SteadyStateClock(torch.device("cpu"), 3)
    sample = clock.sample_ms(lambda: calls.append("step"), 2, before=[lambda: calls.append("prepare")])
    assert calls == ["prepare", "step", "step", "clock", "step", "step", "step", "clock"]
    # Seconds are counted in events here: 4 of them in three steps, times two calls.
    assert sample == pytest.approx(2 * 4e3 / 3)
