"""How fast this host launches kernels, against the reference."""

from __future__ import annotations

from itertools import count

import pytest

from lmkit.measure import host
from lmkit.measure.host import CALLS, EXPONENT, REFERENCE_S, call_seconds, host_pace


def test_the_pace_is_that_of_all_calls_in_half_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that is 0.2 s later whenever it is read: two rounds between its first and its last reading."""
    seconds = 0.8 / (2 * CALLS)
    for measure, expected in ((call_seconds, seconds), (host_pace, (seconds / REFERENCE_S) ** EXPONENT)):
        readings = count(1)
        monkeypatch.setattr(host.time, "perf_counter", lambda readings=readings: 0.2 * next(readings))
        assert measure() == pytest.approx(expected)


def test_this_host_is_no_thousand_times_slower_or_faster() -> None:
    assert 0.001 < host_pace() < 1000
