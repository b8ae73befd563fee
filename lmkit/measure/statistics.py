"""Summarize noisy samples: spread, quantiles, ratios with a confidence interval and a verdict; intervals of time.

Times on a shared machine are skewed to the right and drift, so everything is built on medians, and variants are
compared round by round: what slows a whole round down cancels in the round's ratio.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import fmean, median

FEWEST_PAIRS = 6
"""With fewer pairs no 95% interval of a median exists: even (min, max) of five covers only 94%."""

SMALLEST_DIFFERENCE = 0.005
"""Smallest difference to report, since code alignment alone causes smaller ones. "No difference" means that the whole
interval is nearer to 1 than this."""

FEWEST_REFERENCES = 3

NOISE_BETWEEN_RUNS = 0.005
"""What the same code differs by between two processes at least (memory layout), as a standard deviation."""

_STUDENT_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306),
    *(2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131),
)
"""Half the width of the middle 95% of Student's distribution with 1, 2, ... degrees of freedom; it falls to 1.96."""

WIDTH = 2.8
"""Half the width of an interval between runs, in standard deviations: 98% where their tails are heavy."""


def quantile(samples: Sequence[float], fraction: float) -> float:
    """Return the `fraction` quantile (0 to 1), linearly interpolated between the two nearest order statistics."""
    _refuse_not_finite(samples)
    ordered = sorted(samples)
    position = fraction * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    # Written so that equal neighbours give exactly their own value.
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return an interval that holds the true median with at least this confidence, whatever the distribution.

    The truth lies outside (x[k], x[n-1-k]) of the ordered samples only if at most k of n fall on one side of it, as
    heads of a fair coin do (Conover, Practical Nonparametric Statistics, ch. 3.2).
    """
    _refuse_not_finite(samples)
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


def mean_difference(before: Sequence[float], after: Sequence[float]) -> tuple[float, float | None]:
    """Return mean(after) - mean(before), and half the width of its 95% interval.

    Student's interval for two normal distributions of equal width; None if there is one sample of each.
    """
    _refuse_not_finite(before)
    _refuse_not_finite(after)
    freedom = len(before) + len(after) - 2
    difference = fmean(after) - fmean(before)
    if freedom < 1:
        return difference, None
    squares = sum((x - fmean(some)) ** 2 for some in (before, after) for x in some)
    error = math.sqrt(squares / freedom * (1 / len(before) + 1 / len(after)))
    return difference, _STUDENT_95[min(freedom, len(_STUDENT_95)) - 1] * error


def _refuse_not_finite(samples: Sequence[float]) -> None:
    if not samples or not all(map(math.isfinite, samples)):
        raise ValueError("need samples, all of them finite")


@dataclass(frozen=True)
class Spread:
    """A summary of samples, in their unit."""

    count: int
    median: float
    mean: float
    p10: float
    p90: float

    @property
    def relative(self) -> float:
        """(p90 - p10) / median: the width of the middle 80%, as a share."""
        return (self.p90 - self.p10) / self.median if self.median else 0.0


def spread(samples: Sequence[float]) -> Spread:
    p10, p90 = quantile(samples, 0.1), quantile(samples, 0.9)
    return Spread(len(samples), median(samples), fmean(samples), p10, p90)


@dataclass(frozen=True)
class PairedRatio:
    """How the time of a baseline (or of a run before) compares with that of a candidate (or of a run after).

    Attributes:
        speedup: baseline / candidate; above 1 the candidate is faster.
        low, high: confidence interval of `speedup`: 95% of pairs, 98% of runs.
        pairs: rounds that were compared.
        verdict: "faster", "slower", "no difference" (above the smallest difference that counts), "unclear" or "too
            few repeats" (fewer than `FEWEST_PAIRS`).
    """

    speedup: float
    low: float
    high: float
    pairs: int
    verdict: str

    def __str__(self) -> str:
        said = verdict_in_words(self.verdict, self.low, self.high)
        return f"{self.speedup:.3f}x [{self.low:.3f}, {self.high:.3f}] {said}"


def paired_ratio(candidate: Sequence[float], baseline: Sequence[float]) -> PairedRatio:
    """Compare two variants' times, where sample i of both was taken in round i (see `measure.timing`).

    `speedup` is the median over rounds. A difference is named only if the median's interval excludes 1 and the median
    is at least `SMALLEST_DIFFERENCE` away from it.
    """
    _refuse_bad_times(candidate, baseline)
    ratios = [base / own for own, base in zip(candidate, baseline, strict=True)]
    speedup, interval = median(ratios), median_interval(ratios)
    verdict = _verdict(speedup, interval, len(ratios), SMALLEST_DIFFERENCE)
    return PairedRatio(speedup, *interval, len(ratios), verdict)


def compare_runs(
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]],
    references: Sequence[bool],
    *,
    smallest_difference: float,
) -> list[PairedRatio]:
    """Compare two separate runs by (before, after) samples of each measurement.

    A time is the lower quartile of its samples: other processes only ever lengthen samples. Drift is the median
    change of the references; with fewer than `FEWEST_REFERENCES` it is not corrected. Noise between runs is how far
    changes of the steadiest scatter around their median, of the references and of the others.

    Args:
        references: which measurements are of code that did not change.
    """
    changes, variances = [], []  # of the logarithm of before / after
    for before, after in pairs:
        _refuse_bad_times(before, after)
        (log_before, error_before), (log_after, error_after) = _log_quartile(before), _log_quartile(after)
        changes.append(log_before - log_after)
        variances.append(error_before**2 + error_after**2)
    stable = [change for change, known in zip(changes, references, strict=True) if known]
    others = [change for change, known in zip(changes, references, strict=True) if not known]
    is_known = len(stable) >= FEWEST_REFERENCES
    drift = median(stable) if is_known else 0.0
    centers = {True: median(stable or [0.0]), False: median(others or [0.0])}
    noise = NOISE_BETWEEN_RUNS**2
    if len(pairs) >= FEWEST_PAIRS:
        steadiest = sorted(zip(variances, changes, references, strict=True))[: len(pairs) * 3 // 4]
        distances = [abs(change - centers[known]) for _, change, known in steadiest]
        # 1.4826: a standard deviation from a median. An estimate from few needs room.
        scatter = 1.4826 * median(distances) * (1.0 + 3.0 / len(distances))
        noise = max(noise, scatter**2 - median(variance for variance, *_ in steadiest))
    shared = noise * (1.0 + 1.57 / len(stable) if is_known else 1.0)  # pi / 2: of a median, the drift
    results = []
    for (before, after), change, variance in zip(pairs, changes, variances, strict=True):
        reach = WIDTH * math.sqrt(variance + shared)
        low, speedup, high = (math.exp(change - drift + by) for by in (-reach, 0.0, reach))
        repeats = min(len(before), len(after))
        verdict = _verdict(speedup, (low, high), repeats, smallest_difference)
        results.append(PairedRatio(speedup, low, high, repeats, verdict))
    return results


def _log_quartile(samples: Sequence[float]) -> tuple[float, float]:
    """Return the logarithm of the lower quartile, and its standard error from the order statistics around it."""
    step = math.sqrt(0.25 * 0.75 / len(samples))
    fractions = max(0.0, 0.25 - step), 0.25, min(1.0, 0.25 + step)
    low, middle, high = (math.log(quantile(samples, fraction)) for fraction in fractions)
    return middle, (high - low) / 2.0


def _refuse_bad_times(*samples: Sequence[float]) -> None:
    if any(not times or not all(0 < time < math.inf for time in times) for times in samples):  # NaN: neither
        raise ValueError("need samples of both, all positive and finite")


def _verdict(speedup: float, interval: tuple[float, float], pairs: int, smallest_difference: float) -> str:
    low, high = interval
    if pairs < FEWEST_PAIRS:
        return "too few repeats"
    if low > 1.0 and speedup >= 1.0 + smallest_difference:
        return "faster"
    if high < 1.0 and speedup <= 1.0 / (1.0 + smallest_difference):
        return "slower"
    is_within = 1.0 / (1.0 + smallest_difference) <= low and high <= 1.0 + smallest_difference
    return "no difference" if is_within else "unclear"


def verdict_in_words(
    verdict: str, low: float, high: float, smallest_difference: float = SMALLEST_DIFFERENCE
) -> str:
    if verdict == "no difference":
        return f"no difference above {100 * smallest_difference:.3g}%"
    known = verdict == "unclear" and math.isfinite(low + high)
    return f"unclear: between {low - 1:+.1%} and {high - 1:+.1%}" if known else verdict


Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return disjoint sorted intervals that cover the same time."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def total(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in union(intervals))


def overlap(some: Iterable[Interval], others: Iterable[Interval]) -> float:
    """Return the length of the time that both cover: |A| + |B| - |A or B|."""
    ours, theirs = union(some), union(others)
    return total(ours) + total(theirs) - total(ours + theirs)


def clip(intervals: Iterable[Interval], start: float, end: float) -> list[Interval]:
    """Return the parts inside [start, end]."""
    return [(max(a, start), min(b, end)) for a, b in intervals if a < end and b > start]
