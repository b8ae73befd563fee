"""How the parallel benches time: what is left out of a sample, and what is kept away from it."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

from lmkit.bench import ddp_clock
from lmkit.bench.ddp_clock import SteadyStateClock, without_garbage_collection


def test_the_clock_leaves_out_the_first_steps(monkeypatch):
    """Half as many steps of lead-in, then three timed ones; preparations come before all of them."""
    calls: list[str] = []
    monkeypatch.setattr(ddp_clock.time, "perf_counter", lambda: calls.append("clock") or len(calls))
    clock = SteadyStateClock(torch.device("cpu"), 3)
    sample = clock.sample_ms(lambda: calls.append("step"), 2, before=[lambda: calls.append("prepare")])
    assert calls == ["prepare", "step", "step", "clock", "step", "step", "step", "clock"]
    assert sample == 2 * 4e3 / 3, (
        "seconds are counted in events here: 4 of them in three steps, times two calls"
    )


def test_the_clock_tells_how_far_the_host_was_ahead(monkeypatch):
    """The host hands over a step in 1 s, the GPU takes 3 for it: after 2 + 3 of them the host has 10 s to wait."""
    now, done = 0.0, 0.0

    def step() -> None:
        nonlocal now, done
        now += 1.0
        done = max(done, now - 1.0) + 3.0

    def synchronize(device: torch.device) -> None:
        nonlocal now
        now = max(now, done)

    event = SimpleNamespace(record=lambda: None, elapsed_time=lambda end: 9e3)
    monkeypatch.setattr(ddp_clock.time, "perf_counter", lambda: now)
    monkeypatch.setattr(ddp_clock.torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(ddp_clock.torch.cuda, "synchronize", synchronize)
    clock = SteadyStateClock(torch.device("cuda"), 3)
    assert clock.sample_ms(step, 1, before=[]) == 3e3
    assert clock.ahead_ms == [10e3]


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_as_it_was_after_an_error(was_on):
    states = []

    def fail() -> None:
        with without_garbage_collection():
            states.append(gc.isenabled())
            raise ZeroDivisionError

    (gc.enable if was_on else gc.disable)()
    try:
        with pytest.raises(ZeroDivisionError):
            fail()
        states.append(gc.isenabled())
    finally:
        gc.enable()
    assert states == [False, was_on]
