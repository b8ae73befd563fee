"""Take samples of variants in turns, and compare the first variant with the others."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from lmkit.bench.context import Context
from lmkit.bench.harness import ratio_fields
from lmkit.measure.statistics import paired_ratio, verdict_in_words
from lmkit.measure.tables import Column, Rows
from lmkit.measure.timing import Clock, time_variants, without_garbage_collection

if TYPE_CHECKING:
    import torch

    from lmkit.parallel.ranks import Ranks

HOST_STEPS = 5
SETTLE_S = 1.5
"""Seconds of untimed steps on all GPUs before the first sample. An idle GPU draws little power, and its power limit
reacts late: without these steps the first samples would be too short and the next ones too long."""
SPREAD = Column("spread", "spread", ".1%", note="(p90 - p10) / median")
VERDICT = Column("said", "verdict")
Steps = Mapping[str, Callable[[], object]]


class Sample(NamedTuple):
    """The measurement of one rank.

    Attributes:
        ms: milliseconds per step.
        ahead_ms: how long the GPU worked after its host had queued the last step (`SteadyStateClock`); NaN on a CPU.
    """

    ms: float
    ahead_ms: float


Samples = dict[str, list[list[Sample]]]
"""Variant -> round -> rank."""


def samples_in_turns(
    steps: Steps,
    context: Context,
    turn: Callable[[str], object],
    clock: Clock,
    *,
    rounds: int,
    max_seconds: float = math.inf,
    prepare: Steps | None = None,
    stage: str = "",
    settled: int = 0,
    keep: Callable[[Samples], object] = lambda samples: None,
) -> Samples:
    """Return the samples of all ranks; every round has one of each variant. Collective.

    Args:
        turn: called with the name of a variant before each of its samples, untimed, and then `prepare`.
        max_seconds: no round starts after this many seconds of the first rank that has used them.
        stage: the name under which progress is reported; "": it is not.
        settled: steps at a time, for `SETTLE_S` seconds before the first sample on GPUs; 0: none.
        keep: called with all samples so far after each round.
    """
    import torch
    import torch.distributed as dist

    from lmkit.parallel.collectives import agree

    ranks, samples, done = context.ranks, Samples({name: [] for name in steps}), count()
    order: list[str] = []  # of this round
    ahead_ms: list[float] = getattr(clock, "ahead_ms", [])
    ahead_ms.clear()  # of a round in which a variant failed
    deadline = time.monotonic() + max_seconds

    def begin(name: str) -> None:
        turn(name)
        number = next(done)
        if stage:
            context.progress(f"{stage}, timing", number, rounds * len(steps))
        if number == 0 and settled and ranks.device.type == "cuda":  # idle while the last variant was built
            settle(steps[name], ranks, settled)
        if prepare is not None:
            prepare[name]()
        order.append(name)
        agree(ranks)

    def after_round(own: dict[str, float]) -> bool:
        ahead = dict(zip(order, ahead_ms, strict=True)) if ahead_ms else {}
        order.clear()
        ahead_ms.clear()
        mine = torch.tensor([(own[name], ahead.get(name, math.nan)) for name in steps], dtype=torch.float64)
        of_rank = [mine.clone() for _ in range(ranks.world_size)]
        if ranks.world_size > 1:
            dist.all_gather(of_rank, mine)
        for number, name in enumerate(steps):
            samples[name].append([Sample(*each[number].tolist()) for each in of_rank])
        keep(samples)
        return agree(ranks, stop=time.monotonic() > deadline)

    with without_garbage_collection():
        time_variants(
            steps,
            device=ranks.device,
            repeats=rounds,
            warmup=0,
            prepare={name: lambda name=name: begin(name) for name in steps},  # type: ignore[misc]
            seed=context.recipe.run.seed,
            clock=clock,
            after_round=after_round,
        )
    return samples


def slowest(rounds: Sequence[Sequence[Sample]]) -> list[float]:
    """Return the slowest rank's time of each round: that rank ends the step of all."""
    return [max(sample.ms for sample in of_rank) for of_rank in rounds]


def settle(run: Callable[[], object], ranks: Ranks, steps: int) -> None:
    """Run steps for `SETTLE_S` seconds. Collective."""
    import torch

    from lmkit.parallel.collectives import agree

    until = time.perf_counter() + SETTLE_S
    while not agree(ranks, stop=time.perf_counter() > until):
        for _ in range(steps):
            run()
        torch.cuda.synchronize(ranks.device)


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
