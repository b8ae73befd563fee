"""What the stop watch is worth, measured. Run by `nox -s stopwatch` (it is marked slow).

How long a known duration is said to take; how often a 2% difference is found, and one that is not there, in times of
real work while other processes keep taking the CPU away, and in simulated ones; what ranges cost that are off.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lmkit.data.batches import RandomTokens
from lmkit.measure.environment import describe_environment
from lmkit.measure.ranges import disable_ranges, observe_ranges, range_
from lmkit.measure.statistics import paired_ratio, spread
from lmkit.measure.timing import Timing, time_variants
from lmkit.parallel.ranks import Ranks
from lmkit.recipe.load import load_recipe
from lmkit.recipe.tables import ModelConfig
from lmkit.training.setup import TrainingStep

pytestmark = pytest.mark.slow

COMPARISONS = 100
ROUNDS = (20, 50, 100, 200)
SIMULATIONS = 2000


def count_to(number: int) -> Callable[[], None]:
    """The same instructions whatever the number: two of them differ by their numbers and nothing else."""

    def call() -> None:
        for _ in range(number):
            pass

    return call


def disturb(seed: int) -> None:
    """Take a CPU for a while, leave it for a while, for ever."""
    rng = random.Random(seed)
    while True:
        end = time.perf_counter() + rng.expovariate(50)
        while time.perf_counter() < end:
            pass
        time.sleep(rng.expovariate(50))


@contextmanager
def neighbours() -> Iterator[int]:
    """Two processes for every CPU that want it half of the time each; gives their number."""
    processes = [
        multiprocessing.get_context("spawn").Process(target=disturb, args=(seed,), daemon=True)
        for seed in range(2 * len(os.sched_getaffinity(0)))
    ]
    for process in processes:
        process.start()
    try:
        yield len(processes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def known_duration(milliseconds: float) -> dict[str, Any]:
    """Work that watches the clock itself and ends as soon as the time is over."""

    def spin() -> None:
        end = time.perf_counter() + milliseconds * 1e-3
        while time.perf_counter() < end:
            pass

    timing = time_variants({"spin": spin}, repeats=200)["spin"]
    return {"true_ms": milliseconds, "median_ms": timing.median_ms, "p90_ms": timing.spread.p90}


def verdicts(true_ratio: float, compare: Callable[[int, int], str], comparisons: int) -> dict[str, Any]:
    """How often `compare(seed, rounds)` says what, for each number of rounds."""
    by_rounds = {
        str(rounds): dict(Counter(compare(seed, rounds) for seed in range(comparisons))) for rounds in ROUNDS
    }
    return {"slower_by": round(true_ratio - 1.0, 3), "comparisons": comparisons, "by_rounds": by_rounds}


def real_comparisons() -> list[dict[str, Any]]:
    """Loops of about a millisecond: `same` counts as far as `base`, `slower` 2% further."""
    number = 100_000
    work = {"base": number, "same": number, "slower": round(1.02 * number)}
    timings = [
        time_variants(
            {name: count_to(each) for name, each in work.items()}, repeats=max(ROUNDS), kind="wall", seed=seed
        )
        for seed in range(COMPARISONS)
    ]

    def compare(name: str) -> Callable[[int, int], str]:
        def verdict(seed: int, rounds: int) -> str:
            own, base = (timings[seed][each].samples_ms[:rounds] for each in (name, "base"))
            return paired_ratio(own, base).verdict

        return verdict

    found = [verdicts(work[name] / number, compare(name), COMPARISONS) for name in ("same", "slower")]
    samples = [sample for each in timings for sample in each["base"].samples_ms]
    return [
        each | {"base_ms": spread(samples).median, "base_spread": spread(samples).relative} for each in found
    ]


def simulated_comparisons(noisy_rounds: Callable[..., Any], slower_by: float) -> dict[str, Any]:
    def verdict(seed: int, rounds: int) -> str:
        return paired_ratio(*noisy_rounds(1.0 / slower_by, rounds, seed)).verdict

    return verdicts(slower_by, verdict, SIMULATIONS)


def what_ranges_cost(model: ModelConfig, batch_size: int) -> dict[str, Any]:
    """All ranges that a step opens, off, against the step."""
    assert model.vocab_size is not None
    batches = RandomTokens(
        model.vocab_size, batch_size=batch_size, context_length=model.context_length, seed=0
    )
    step = TrainingStep(model, Ranks(device=torch.device("cpu")), batches)
    opened: list[str] = []
    observe_ranges(lambda name, opens: opened.append(name) if opens else None)
    step.run()
    disable_ranges()

    def open_them_100_times() -> None:
        for name in opened * 100:
            with range_(name):
                pass

    def timed() -> tuple[Timing, Timing]:
        found = time_variants({"ranges": open_them_100_times, "step": step.run}, repeats=60, kind="wall")
        return found["ranges"], found["step"]

    ranges, whole = timed()
    shares = [100 * own / 100 / of for own, of in zip(ranges.samples_ms, whole.samples_ms, strict=True)]
    return {
        "layers": model.num_layers,
        "d_model": model.d_model,
        "attention": model.attention,
        "tokens": batch_size * model.context_length,
        "ranges_per_step": len(opened),
        "ns_per_range": ranges.median_ms / 100 / len(opened) * 1e6,
        "step_ms": whole.median_ms,
        "percent_of_step": spread(shares).median,
        "worst_percent": max(shares),
    }


def test_the_stop_watch(noisy_rounds) -> None:
    torch.set_num_threads(1)
    recipe = load_recipe("quickstart")
    quickstart = recipe.model.model_copy(update={"vocab_size": 2048, "attention": "vectorized"})
    smallest = ModelConfig(
        vocab_size=64,
        context_length=16,
        d_model=32,
        d_ff=64,
        num_layers=1,
        num_heads=2,
        attention="vectorized",
    )
    record: dict[str, Any] = {
        "known_duration": known_duration(4.0),
        "ranges_off": [what_ranges_cost(quickstart, recipe.train.batch_size), what_ranges_cost(smallest, 2)],
    }
    with neighbours() as count:
        record["neighbours"] = count
        record["known_duration_beside_neighbours"] = known_duration(4.0)
        record["real"] = real_comparisons()
    record["simulated"] = [simulated_comparisons(noisy_rounds, slower_by) for slower_by in (1.0, 1.02)]
    record["environment"] = describe_environment()
    target = os.environ.get("LMKIT_STOPWATCH_RECORD")
    if target:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        Path(target).write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({key: record[key] for key in record if key != "environment"}, indent=1))

    assert (
        abs(record["known_duration"]["median_ms"] - 4.0) < 0.04
    )  # 1%: what a call and two clock readings cost
    assert all(each["worst_percent"] < 0.5 for each in record["ranges_off"])
    for kind in ("real", "simulated"):
        same, slower = record[kind]
        for rounds in map(str, ROUNDS):
            # At most 5% of the comparisons may name a difference that is not there; 4 standard deviations more.
            most = 0.05 + 4 * (0.05 * 0.95 / same["comparisons"]) ** 0.5
            named = same["comparisons"] - same["by_rounds"][rounds].get("no difference", 0)
            assert named <= most * same["comparisons"]
        assert slower["by_rounds"][str(max(ROUNDS))]["slower"] >= 0.95 * slower["comparisons"]
