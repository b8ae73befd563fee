"""Intervals of time, (start, end) in any unit: what they cover together, and how much of it others cover too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

Time = TypeVar("Time", int, float)


def union(intervals: Iterable[tuple[Time, Time]]) -> list[tuple[Time, Time]]:
    """Disjoint sorted intervals that cover the same time."""
    merged: list[tuple[Time, Time]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def total(intervals: Iterable[tuple[Time, Time]]) -> Time:
    """Length of the union."""
    return sum(end - start for start, end in union(intervals))


def overlap(some: Iterable[tuple[Time, Time]], others: Iterable[tuple[Time, Time]]) -> Time:
    """Length of the time that both cover: |A| + |B| - |A or B|."""
    ours, theirs = union(some), union(others)
    return total(ours) + total(theirs) - total(ours + theirs)


def clip(intervals: Iterable[tuple[Time, Time]], start: Time, end: Time) -> list[tuple[Time, Time]]:
    """The parts inside [start, end]."""
    return [(max(a, start), min(b, end)) for a, b in intervals if a < end and b > start]
