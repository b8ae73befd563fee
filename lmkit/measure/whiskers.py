"""Whiskers for pictures: how far the middle 80% of a row's samples reaches below and above its median."""

from __future__ import annotations

from collections.abc import Sequence

from lmkit.measure.statistics import spread
from lmkit.measure.tables import Row

Whisker = tuple[float, float]
"""Lengths below and above, in the unit of the value."""


def of_time(row: Row, key: str = "median_ms") -> Whisker | None:
    """p10 to p90 around the time at `key`; None where the row has no time."""
    if row.get(key) is None:
        return None
    return row[key] - row["p10_ms"], row["p90_ms"] - row[key]


def of_rate(row: Row, key: str = "median_ms") -> Whisker | None:
    """The same for `tokens_per_s`, which is counted over the time at `key`: slow samples are low rates."""
    if row.get("tokens_per_s") is None:
        return None
    rate = row["tokens_per_s"]
    return rate - rate * row[key] / row["p90_ms"], rate * row[key] / row["p10_ms"] - rate


def of_samples(samples: Sequence[float]) -> Whisker:
    """p10 to p90 around the median of the samples."""
    summary = spread(samples)
    return summary.median - summary.p10, summary.p90 - summary.median
