"""What benches share whose variants take turns and whose first variant is compared with the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from lmkit.bench.context import Context
from lmkit.bench.harness import ratio_fields
from lmkit.measure.statistics import paired_ratio, verdict_in_words
from lmkit.measure.tables import Column, Rows
from lmkit.measure.timing import SteadyStateClock, time_variants, without_garbage_collection

if TYPE_CHECKING:
    import torch

HOST_STEPS = 5
SPREAD = Column("spread", "spread", ".1%", note="(p90 - p10) / median")
VERDICT = Column("said", "verdict")
Steps = Mapping[str, Callable[[], object]]


def samples_in_turns(
    steps: Steps, context: Context, turns: list[str], *, prepare: Steps | None = None
) -> dict[str, tuple[float, ...]]:
    """Return variant -> ms of a step in each round; a sample is `steps_per_sample` steps in steady state.

    Args:
        turns: gets the name of each variant as its turn comes.
        prepare: called before each sample, untimed.
    """
    options = context.options
    with without_garbage_collection():
        timings = time_variants(
            steps,
            device=context.device,
            repeats=options.rounds,
            warmup=1,
            max_seconds=options.max_seconds,
            seed=context.recipe.run.seed,
            prepare=prepare,
            clock=SteadyStateClock(context.device, options.steps_per_sample),
            turn=turns.append,
        )
    return {variant: timing.samples_ms for variant, timing in timings.items()}


def host_ms(step: Callable[[], object], device: torch.device) -> float:
    """Return the median ms until a step on an idle GPU returns to the host; waits inside the step count."""
    import torch

    found = []
    with without_garbage_collection():
        for _ in range(HOST_STEPS):
            torch.cuda.synchronize(device)
            began = time.perf_counter()
            step()
            found.append((time.perf_counter() - began) * 1e3)
    torch.cuda.synchronize(device)
    return median(found)


def compare_with_first(
    rows: Mapping[str, dict[str, Any]], samples: Mapping[str, Sequence[float]], first: str
) -> None:
    """Say in the rows of the other variants how many times as fast the first is (`first_is`)."""
    for variant, samples_ms in samples.items():
        if variant != first and first in samples:
            rows[variant] |= ratio_fields(paired_ratio(samples[first], samples_ms), "first_is", "verdict")


def comparison(row: dict[str, Any], digits: int) -> str:
    """Return the sentence about a row that `compare_with_first` filled."""
    ratio, low, high = (f"{row[key]:.{digits}f}" for key in ("first_is", "first_is_low", "first_is_high"))
    said = verdict_of(row)
    return f"{row['versus']} is {ratio}x as fast as {row['variant']} (95%: {low} to {high}; {said})."


def verdict_of(row: Mapping[str, Any]) -> str | None:
    """Return the verdict of a row that `compare_with_first` filled, in words; None for other rows."""
    if row.get("first_is") is None:
        return None
    return verdict_in_words(row["verdict"], row["first_is_low"], row["first_is_high"])


def with_verdicts(rows: Rows) -> Rows:
    """Return the rows with their verdicts in words, for the column `VERDICT`."""
    return [row | {"said": verdict_of(row)} for row in rows]


def comparison_column(rows: Rows, spec: str) -> Column:
    """Return the column of the comparison, with a note."""
    first = rows[0]["versus"]
    note = f"how many times as fast {first} is, the median over rounds"
    return Column("first_is", f"{first} x", spec, note=note)
