import random
from collections.abc import Callable

import pytest

Rounds = tuple[list[float], list[float]]


def noisy_times(true_ratio: float, rounds: int, seed: int) -> Rounds:
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


@pytest.fixture
def noisy_rounds() -> Callable[[float, int, int], Rounds]:
    """`noisy_rounds(true_ratio, rounds, seed)`: simulated times of a candidate and its baseline."""
    return noisy_times
