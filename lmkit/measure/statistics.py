"""Summarize noisy samples: spread, quantiles, ratios with a confidence interval and a verdict; intervals of time.

Times on a shared machine are skewed to the right and drift, so everything is built on medians, and variants are
compared round by round: what slows a whole round down cancels in the round's ratio.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import fmean, median
from typing import Any, TypeVar

FEWEST_PAIRS = 6
"""With fewer pairs no 95% interval of a median exists: even (min, max) of five covers only 94%."""

SMALLEST_DIFFERENCE = 0.005
"""Smaller differences are not called differences: code alignment alone makes them."""

CONFIDENCE = 0.95


def quantile(samples: Sequence[float], fraction: float) -> float:
    """Return the `fraction` quantile (0 to 1), linearly interpolated between the two nearest order statistics.

    Raises:
        ValueError: `samples` is empty, or `fraction` is outside [0, 1].
    """
    if not samples or not 0.0 <= fraction <= 1.0:
        raise ValueError(f"need samples and a fraction in [0, 1], got {len(samples)} and {fraction}")
    ordered = sorted(samples)
    position = fraction * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    # Written so that equal neighbours give themselves back exactly.
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def median_interval(samples: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return an interval that holds the true median with at least this confidence, whatever the distribution.

    The truth lies outside (x[k], x[n-1-k]) of the ordered samples only if at most k of n fall on one side of it, as
    heads of a fair coin do (Conover, Practical Nonparametric Statistics, ch. 3.2).

    Raises:
        ValueError: `samples` is empty.
    """
    if not samples:
        raise ValueError("an interval needs at least one sample")
    ordered, count = sorted(samples), len(samples)
    # Of the 2^count outcomes of the coin: how many may lie outside, and how many do. Whole numbers never underflow.
    allowed = Fraction(1.0 - confidence) * 2**count
    k, outcomes = 0, 1  # outcomes: count over k
    outside = 2
    while k < (count - 1) // 2:
        outcomes = outcomes * (count - k) // (k + 1)
        outside += 2 * outcomes
        if outside > allowed:
            break
        k += 1
    return ordered[k], ordered[count - 1 - k]


@dataclass(frozen=True)
class Spread:
    """A summary of samples, in their unit."""

    count: int
    median: float
    mean: float
    p10: float
    p90: float
    minimum: float

    @property
    def relative(self) -> float:
        """(p90 - p10) / median: the width of the middle 80%, as a share."""
        return (self.p90 - self.p10) / self.median if self.median else 0.0


def spread(samples: Sequence[float]) -> Spread:
    """Summarize `samples` (at least one)."""
    p10, p90 = quantile(samples, 0.1), quantile(samples, 0.9)
    return Spread(len(samples), median(samples), fmean(samples), p10, p90, min(samples))


@dataclass(frozen=True)
class PairedRatio:
    """The comparison of a candidate with a baseline.

    Attributes:
        speedup: baseline / candidate; above 1 the candidate is faster.
        low, high: 95% confidence interval of `speedup`.
        pairs: rounds that were compared, or the samples of the shorter list.
        verdict: "faster", "slower", "no difference" or "too few repeats" (fewer than `FEWEST_PAIRS`).
    """

    speedup: float
    low: float
    high: float
    pairs: int
    verdict: str

    def __str__(self) -> str:
        return f"{self.speedup:.3f}x [{self.low:.3f}, {self.high:.3f}] {self.verdict}"


def paired_ratio(candidate: Sequence[float], baseline: Sequence[float]) -> PairedRatio:
    """Compare two variants' times, where sample i of both was taken in round i (see `measure.timing`).

    `speedup` is the median over rounds. A difference is named only if the median's interval excludes 1 and the median
    is at least `SMALLEST_DIFFERENCE` away from it.

    Raises:
        ValueError: the lists differ in length, are empty, or hold a time that is not positive.
    """
    if len(candidate) != len(baseline):
        raise ValueError(f"need equally many samples of both, got {len(candidate)} and {len(baseline)}")
    _refuse_bad_times(candidate, baseline)
    ratios = [base / own for own, base in zip(candidate, baseline, strict=True)]
    return _judge(median(ratios), median_interval(ratios), len(ratios), SMALLEST_DIFFERENCE)


def unpaired_ratio(
    candidate: Sequence[float],
    baseline: Sequence[float],
    *,
    smallest_difference: float,
    resamples: int = 2000,
) -> PairedRatio:
    """Compare samples of two separate runs: the ratio of their medians, each resampled by itself (the percentile
    bootstrap: Efron and Tibshirani 1993, ch. 13).

    Args:
        smallest_difference: what two runs of the same thing differ by: what differs between runs as a whole (clocks,
            neighbours, memory layout) is not in the interval.

    Raises:
        ValueError: a list is empty, or holds a time that is not positive.
    """
    import numpy as np

    _refuse_bad_times(candidate, baseline)
    generator = np.random.default_rng(0)

    def resampled_medians(samples: Sequence[float]) -> Any:
        picks = generator.integers(0, len(samples), size=(resamples, len(samples)))
        return np.median(np.asarray(samples, dtype=np.float64)[picks], axis=1)  # (resamples,)

    ratios = resampled_medians(baseline) / resampled_medians(candidate)
    tail = (1.0 - CONFIDENCE) / 2.0
    low, high = (float(edge) for edge in np.quantile(ratios, [tail, 1.0 - tail]))
    fewest = min(len(candidate), len(baseline))
    return _judge(median(baseline) / median(candidate), (low, high), fewest, smallest_difference)


def _refuse_bad_times(*samples: Sequence[float]) -> None:
    if any(not times or min(times) <= 0 for times in samples):
        raise ValueError("need samples of both, all positive")


def _judge(
    speedup: float, interval: tuple[float, float], pairs: int, smallest_difference: float
) -> PairedRatio:
    low, high = interval
    if pairs < FEWEST_PAIRS:
        verdict = "too few repeats"
    elif low > 1.0 and speedup >= 1.0 + smallest_difference:
        verdict = "faster"
    elif high < 1.0 and speedup <= 1.0 / (1.0 + smallest_difference):
        verdict = "slower"
    else:
        verdict = "no difference"
    return PairedRatio(speedup, low, high, pairs, verdict)


Time = TypeVar("Time", int, float)


def union(intervals: Iterable[tuple[Time, Time]]) -> list[tuple[Time, Time]]:
    """Return disjoint sorted intervals that cover the same time."""
    merged: list[tuple[Time, Time]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def total(intervals: Iterable[tuple[Time, Time]]) -> Time:
    """Return the length of the union."""
    return sum(end - start for start, end in union(intervals))


def overlap(some: Iterable[tuple[Time, Time]], others: Iterable[tuple[Time, Time]]) -> Time:
    """Return the length of the time that both cover: |A| + |B| - |A or B|."""
    ours, theirs = union(some), union(others)
    return total(ours) + total(theirs) - total(ours + theirs)


def clip(intervals: Iterable[tuple[Time, Time]], start: Time, end: Time) -> list[tuple[Time, Time]]:
    """Return the parts inside [start, end]."""
    return [(max(a, start), min(b, end)) for a, b in intervals if a < end and b > start]
