import math
import random
from functools import partial

import pytest

from lmkit.measure import statistics


def test_quantiles_and_spread_by_hand():
    samples = [4.0, 1.0, 3.0, 2.0]
    assert [statistics.quantile(samples, fraction) for fraction in (0.0, 0.25, 0.5, 1.0)] == [
        1.0,
        1.75,
        2.5,
        4.0,
    ]
    result = statistics.spread([1.0, 2.0, 3.0, 4.0, 90.0])
    assert (result.count, result.median, result.mean) == (5, 3.0, 20.0)
    assert result.relative == pytest.approx((55.6 - 1.4) / 3.0)


def noisy_times(true_ratio, rounds, seed):
    """Times of (candidate, baseline) on a bad machine: slow drift, 5% jitter, and one sample in ten far too slow."""
    rng = random.Random(seed)
    candidate, baseline = [], []
    for index in range(rounds):
        drift = 10.0 * (1.0 + 0.3 * index / rounds) * rng.lognormvariate(0.0, 0.05)
        for times, factor in ((candidate, 1.0 / true_ratio), (baseline, 1.0)):
            spike = rng.uniform(1.5, 3.0) if rng.random() < 0.1 else 1.0
            times.append(drift * factor * rng.lognormvariate(0.0, 0.02) * spike)
    return candidate, baseline


@pytest.mark.parametrize(("true_ratio", "verdict"), [(1.02, "faster"), (1 / 1.02, "slower")])
def test_two_percent_is_found_on_a_noisy_machine(true_ratio, verdict):
    results = [statistics.paired_ratio(*noisy_times(true_ratio, 200, seed)) for seed in range(300)]
    assert {result.verdict for result in results} == {verdict}
    # The interval promises 95% of them; 4 standard deviations of a proportion below.
    assert sum(result.low <= true_ratio <= result.high for result in results) >= (0.95 - 0.051) * 300


@pytest.mark.parametrize("rounds", [6, 9, 20])
def test_few_noisy_rounds_do_not_make_a_difference_out_of_nothing(rounds):
    """Where both are the same, 5% of the comparisons may miss that: 3.3 standard deviations above are 6.6% of 2000.
    The bootstrap misses 6 to 9%; without any interval nearly all are called a difference."""
    rng = random.Random(rounds)
    misses = named = 0
    for _ in range(2000):
        times = [[rng.lognormvariate(0.0, 0.05) for _ in range(rounds)] for _ in range(2)]
        result = statistics.paired_ratio(*times)
        misses += not result.low <= 1.0 <= result.high
        named += result.verdict in ("faster", "slower")
    assert named <= misses <= 0.066 * 2000
    assert misses > 0.005 * 2000  # and it is no wider than it has to be


def test_the_interval_of_a_median_by_hand():
    """Of 10 samples (x0 ... x9), outside (x1, x8) with probability 2 (1 + 10) / 1024 = 2.1%; (x2, x7) would be
    outside with 2 (1 + 10 + 45) / 1024 = 10.9%."""
    samples = [float(value) for value in (3, 0, 7, 1, 9, 5, 2, 8, 4, 6)]
    assert statistics.median_interval(samples) == (1.0, 8.0)
    assert statistics.median_interval(samples, confidence=0.89) == (2.0, 7.0)
    assert statistics.median_interval(samples, confidence=0.9999) == (0.0, 9.0)
    assert statistics.median_interval([4.0, 2.0]) == (2.0, 4.0)
    assert statistics.median_interval([4.0]) == (4.0, 4.0)
    # 5000 samples, standard deviation of the rank sqrt(5000) / 2 = 35: 1.96 of that on either side, to a whole rank
    low, high = statistics.median_interval([float(value) for value in range(5000)])
    assert (2499.5 - low, high - 2499.5) == (pytest.approx(69.3, abs=1.5), pytest.approx(69.3, abs=1.5))
    with pytest.raises(ValueError, match="sample"):
        statistics.median_interval([])


@pytest.mark.parametrize(
    ("candidate", "baseline", "verdict"),
    [
        ([1.0] * (statistics.FEWEST_PAIRS - 1), [9.0] * (statistics.FEWEST_PAIRS - 1), "too few repeats"),
        ([1.0] * statistics.FEWEST_PAIRS, [9.0] * statistics.FEWEST_PAIRS, "faster"),
        ([10.0] * 50, [10.02] * 50, "no difference"),  # certain, but tiny
        ([10.02] * 50, [10.0] * 50, "no difference"),
        ([1.0] * 6, [1.0, 1.1, 1.1, 1.1, 1.1, 1.1], "unclear"),  # an interval that ends at one
        ([1.0, 1.1, 1.1, 1.1, 1.1, 1.1], [1.0] * 6, "unclear"),
        ([10.0] * 6, [10.0, 10.04, 10.0, 10.0, 10.0, 10.0], "no difference"),  # the interval is all of it
        ([10.0] * 6, [9.8, 10.0, 10.0, 10.0, 10.0, 10.0], "unclear"),
    ],
)
def test_verdicts(candidate, baseline, verdict):
    assert statistics.paired_ratio(candidate, baseline).verdict == verdict


def test_separate_runs_are_compared():
    rng = random.Random(1)
    slow = [10.0 * rng.lognormvariate(0.0, 0.03) for _ in range(60)]
    fast = [8.0 * rng.lognormvariate(0.0, 0.03) for _ in range(40)]
    for before, after, difference, verdict in (
        (slow, fast, 0.05, "faster"),
        (fast, slow, 0.05, "slower"),
        (slow[30:], slow[:30], 0.1, "no difference"),
        (slow[30:], slow[:30], 0.01, "unclear"),  # a narrower threshold than the interval
        (slow, fast, 0.5, "no difference"),
        (slow, fast[: statistics.FEWEST_PAIRS - 1], 0.05, "too few repeats"),
    ):
        (result,) = statistics.compare_runs([(before, after)], [False], smallest_difference=difference)
        assert result.verdict == verdict
        assert result.low < result.speedup < result.high
    with pytest.raises(ValueError, match="samples"):
        statistics.compare_runs([(slow, [])], [False], smallest_difference=0.05)
    assert statistics.compare_runs([], [], smallest_difference=0.05) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "summarize",
    [
        statistics.spread,
        statistics.median_interval,
        partial(statistics.quantile, fraction=0.5),
        partial(statistics.mean_difference, [1.0, 2.0]),
    ],
)
def test_numbers_that_are_not_finite_are_not_summarized(summarize, bad):
    with pytest.raises(ValueError, match="finite"):
        summarize([1.0, bad, 2.0])


def test_intervals_of_time_by_hand():
    assert statistics.union([(5, 7), (0, 2), (1, 3)]) == [(0, 3), (5, 7)]
    assert statistics.total([(0, 2), (1, 3), (5, 7)]) == 5
    assert statistics.overlap([(0, 2), (1, 4)], [(3, 6), (5, 9)]) == 1
    assert statistics.clip([(0, 2), (1, 5), (6, 9)], 1, 5) == [(1, 2), (1, 5)]
