import random

import pytest

from lmkit.measure.statistics import (
    FEWEST_PAIRS,
    median,
    median_absolute_deviation,
    paired_ratio,
    quantile,
    spread,
    unpaired_ratio,
)


def noisy_rounds(true_ratio: float, rounds: int, seed: int) -> tuple[list[float], list[float]]:
    """Times of (candidate, baseline) on a bad machine: slow drift, 5% jitter, and one sample in ten far too slow."""
    rng = random.Random(seed)
    candidate, baseline = [], []
    for index in range(rounds):
        drift = 10.0 * (1.0 + 0.3 * index / rounds) * rng.lognormvariate(0.0, 0.05)
        pair = []
        for factor in (1.0 / true_ratio, 1.0):
            spike = rng.uniform(1.5, 3.0) if rng.random() < 0.1 else 1.0
            pair.append(drift * factor * rng.lognormvariate(0.0, 0.02) * spike)
        candidate.append(pair[0])
        baseline.append(pair[1])
    return candidate, baseline


def test_quantiles_by_hand():
    samples = [4.0, 1.0, 3.0, 2.0]
    assert median(samples) == 2.5
    assert quantile(samples, 0.0) == 1.0
    assert quantile(samples, 1.0) == 4.0
    assert quantile(samples, 0.25) == 1.75
    assert median([7.0]) == 7.0
    assert median_absolute_deviation([1.0, 2.0, 3.0, 100.0]) == 1.0


def test_spread_by_hand():
    result = spread([1.0, 2.0, 3.0, 4.0, 90.0])
    assert (result.count, result.median, result.mean) == (5, 3.0, 20.0)
    assert (result.minimum, result.maximum, result.mad) == (1.0, 90.0, 1.0)


@pytest.mark.parametrize(("samples", "fraction"), [([], 0.5), ([1.0], 1.5)])
def test_quantile_refuses(samples, fraction):
    with pytest.raises(ValueError, match=r"sample|fraction"):
        quantile(samples, fraction)


@pytest.mark.parametrize("seed", range(5))
def test_two_percent_is_found_on_a_noisy_machine(seed):
    result = paired_ratio(*noisy_rounds(1.02, 200, seed))
    assert result.verdict == "faster"
    assert result.low < 1.02 < result.high
    slower = paired_ratio(*noisy_rounds(1 / 1.02, 200, seed))
    assert slower.verdict == "slower"


def test_no_difference_is_not_found_on_a_noisy_machine():
    verdicts = [paired_ratio(*noisy_rounds(1.0, 200, seed)).verdict for seed in range(40)]
    # 5% false alarms from the interval alone would be 2 of 40; the half-percent threshold removes most of them.
    assert verdicts.count("no difference") >= 38


def test_unpaired_medians_would_be_fooled():
    """Why pairing: with drift much larger than the difference, the ratio per round still sees the 2%."""
    baseline = [10.0 * 1.05**index for index in range(20)]
    candidate = [time / 1.02 for time in baseline]
    result = paired_ratio(candidate, baseline)
    assert result.low == pytest.approx(1.02)
    assert result.high == pytest.approx(1.02)


def test_few_repeats_give_no_verdict():
    assert paired_ratio([1.0] * (FEWEST_PAIRS - 1), [9.0] * (FEWEST_PAIRS - 1)).verdict == "too few repeats"
    assert paired_ratio([1.0] * FEWEST_PAIRS, [9.0] * FEWEST_PAIRS).verdict == "faster"


def test_a_certain_but_tiny_difference_is_no_difference():
    assert paired_ratio([10.0] * 50, [10.02] * 50).verdict == "no difference"


def test_separate_runs_are_compared_by_their_medians():
    rng = random.Random(1)
    slow = [10.0 * rng.lognormvariate(0.0, 0.03) for _ in range(60)]
    fast = [8.0 * rng.lognormvariate(0.0, 0.03) for _ in range(40)]
    result = unpaired_ratio(fast, slow)
    assert result.verdict == "faster"
    assert result.low < 10.0 / 8.0 < result.high
    assert unpaired_ratio(slow, fast).verdict == "slower"
    assert unpaired_ratio(slow[:30], slow[30:]).verdict == "no difference"
    assert unpaired_ratio(fast, slow, smallest_difference=0.5).verdict == "no difference"
    with pytest.raises(ValueError, match="samples"):
        unpaired_ratio([], slow)


@pytest.mark.parametrize(("candidate", "baseline"), [([1.0], [1.0, 2.0]), ([], []), ([0.0], [1.0])])
def test_paired_ratio_refuses(candidate, baseline):
    with pytest.raises(ValueError, match=r"samples|positive"):
        paired_ratio(candidate, baseline)
