"""How often a comparison of two times is right, measured. Run by `nox -s stopwatch` (it is marked slow).

How long a known duration is said to take; how often a 2% difference is found, and one that is not there, in times of
real work while other processes keep taking the CPU away, and in simulated ones.
"""

import json
import multiprocessing
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lmkit.measure.environment import describe_environment
from lmkit.measure.statistics import paired_ratio, spread
from lmkit.measure.timing import time_variants

pytestmark = pytest.mark.slow

COMPARISONS = 100
ROUNDS = (20, 50, 100, 200)
SIMULATIONS = 2000


def count_to(number: int) -> None:
    """The same instructions whatever the number: two of them differ by their numbers and nothing else."""
    for _ in range(number):
        pass


def spin(seconds: float) -> None:
    """Watch the clock, and end as soon as the time is over."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def disturb(seed: int) -> None:
    """Take a CPU for a while, leave it for a while, for ever."""
    rng = random.Random(seed)
    while True:
        spin(rng.expovariate(50))
        time.sleep(rng.expovariate(50))


@contextmanager
def neighbours() -> Iterator[int]:
    """Two processes for every CPU that want it half of the time each; gives their number."""
    spawn = multiprocessing.get_context("spawn")
    count = 2 * len(os.sched_getaffinity(0))
    processes = [spawn.Process(target=disturb, args=(seed,), daemon=True) for seed in range(count)]
    for process in processes:
        process.start()
    try:
        yield count
    finally:
        for process in processes:
            process.kill()
            process.join()


def known_duration(milliseconds: float) -> dict[str, Any]:
    timing = time_variants({"spin": partial(spin, milliseconds * 1e-3)}, repeats=200)["spin"]
    return {"true_ms": milliseconds, "median_ms": timing.median_ms, "p90_ms": timing.spread.p90}


def verdicts(slower_by: float, compare: Callable[[int, int], str], comparisons: int) -> dict[str, Any]:
    """How often `compare(seed, rounds)` says what, for each number of rounds."""
    by_rounds = {
        str(rounds): dict(Counter(compare(seed, rounds) for seed in range(comparisons))) for rounds in ROUNDS
    }
    return {"slower_by": slower_by, "comparisons": comparisons, "by_rounds": by_rounds}


def real_comparisons() -> list[dict[str, Any]]:
    """Loops of about a millisecond: `same` counts as far as `base`, `slower` 2% further."""
    numbers = {"base": 100_000, "same": 100_000, "slower": 102_000}
    work = {name: partial(count_to, number) for name, number in numbers.items()}
    timings = [
        time_variants(work, repeats=max(ROUNDS), kind="wall", seed=seed) for seed in range(COMPARISONS)
    ]

    def compare(name: str, seed: int, rounds: int) -> str:
        own, base = (timings[seed][each].samples_ms[:rounds] for each in (name, "base"))
        return paired_ratio(own, base).verdict

    base = spread([sample for each in timings for sample in each["base"].samples_ms])
    return [
        verdicts(slower_by, partial(compare, name), COMPARISONS)
        | {"base_ms": base.median, "base_spread": base.relative}
        for name, slower_by in (("same", 0.0), ("slower", 0.02))
    ]


def simulated_comparisons(noisy_rounds: Callable[..., Any]) -> list[dict[str, Any]]:
    def compare(slower_by: float, seed: int, rounds: int) -> str:
        return paired_ratio(*noisy_rounds(1.0 / (1.0 + slower_by), rounds, seed)).verdict

    return [verdicts(slower_by, partial(compare, slower_by), SIMULATIONS) for slower_by in (0.0, 0.02)]


def test_the_stop_watch(noisy_rounds):
    torch.set_num_threads(1)
    record: dict[str, Any] = {"known_duration": known_duration(4.0)}
    with neighbours() as count:
        record["neighbours"] = count
        record["known_duration_beside_neighbours"] = known_duration(4.0)
        record["real"] = real_comparisons()
    record["simulated"] = simulated_comparisons(noisy_rounds)
    print(json.dumps(record, indent=1))
    if target := os.environ.get("LMKIT_STOPWATCH_RECORD"):
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        environment = {"environment": describe_environment()}
        Path(target).write_text(json.dumps(record | environment, indent=1) + "\n")

    # 1%: what a call and two clock readings cost
    assert record["known_duration"]["median_ms"] == pytest.approx(4.0, abs=0.04)
    for same, slower in (record["real"], record["simulated"]):
        for found in same["by_rounds"].values():
            # At most 5% of the comparisons may name a difference that is not there; 4 standard deviations more.
            most = 0.05 + 4 * (0.05 * 0.95 / same["comparisons"]) ** 0.5
            named = found.get("faster", 0) + found.get("slower", 0)
            assert named <= most * same["comparisons"]
        assert slower["by_rounds"][str(max(ROUNDS))]["slower"] >= 0.95 * slower["comparisons"]
