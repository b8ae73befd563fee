"""The engine of `bench model`, `step`, `ddp`, `optimizer` and `lm-matrix`, and of `bench generate`.

A bench describes its variants (`Variant`). `measure` builds each and checks its first steps, times the right ones in
turns, and checks them again. A variant that fails, does not fit or is wrong becomes a row on every rank. The bench
then computes the figures of the rows from the samples.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from lmkit.bench.context import Context, failure_on_any_rank_is_a_row, time_what_fits
from lmkit.bench.harness import add_figures, mfu_fields, ratio_fields, time_fields, without_figures
from lmkit.bench.summary import UNCHECKED
from lmkit.measure.limits import Limits
from lmkit.measure.memory import GB, memory_in_use, release_memory, track_peak
from lmkit.measure.statistics import paired_ratio, verdict_in_words
from lmkit.measure.tables import Column, Rows
from lmkit.measure.timing import Clock, SteadyStateClock, time_variants, without_garbage_collection

if TYPE_CHECKING:
    import torch

    from lmkit.parallel.ranks import Ranks


def _nothing(training: Any) -> dict[str, Any]:
    return {}


@dataclass
class Variant:
    """A training, or a model that writes, that a bench times.

    Attributes:
        row: what identifies it, and status "ok"; a row with another status is not built.
        make: builds the training; without collectives.
        judge: makes its first steps; returns fields with a status.
        more: returns what is measured of a right training before it is timed.
        prepare: called before each sample, untimed.
        run: makes one step, or the part of a step that is timed.
        check: returns status and detail if the training is wrong after it was timed, else {}.
    """

    row: dict[str, Any]
    make: Callable[[], Any]
    judge: Callable[[Any], dict[str, Any]] = _nothing
    more: Callable[[Any], dict[str, Any]] = _nothing
    prepare: Callable[[Any], object] = _nothing
    run: Callable[[Any], object] = lambda training: training.run()
    check: Callable[[Any], dict[str, Any]] = _nothing


def measure_figures(
    variants: Mapping[str, Variant],
    context: Context,
    limits: Limits | None,
    figures: Callable[[str, list[float]], dict[str, Any]],
    **options: Any,
) -> tuple[dict[str, dict[str, Any]], dict[str, list[float]]]:
    """Measure variants, and add figures to their rows.

    Args:
        figures: returns the figures of a variant, from the samples of the slowest rank.
        options: of `measure`.

    Returns:
        The rows, and the samples of rows whose figures are believed.
    """
    samples = measure(variants, context, **options)
    rows = {name: variant.row for name, variant in variants.items()}
    believed = {}
    for name, rounds in samples.items():
        samples_ms = slowest(rounds)
        if add_figures(rows[name], limits, partial(figures, name, samples_ms)):
            believed[name] = samples_ms
    return rows, believed


def measure(
    variants: Mapping[str, Variant],
    context: Context,
    *,
    clock: Clock | None = None,
    stage: str = "",
    settle: bool = False,
    **turns: Any,
) -> Samples:
    """Measure variants that fit into memory together; return the samples of the right ones. Collective.

    Args:
        clock: None: the options' `steps_per_sample` steps in steady state.
        settle: make untimed steps before the first sample on GPUs.
        stage, turns: of `samples_in_turns`.
    """
    steps = 0 if clock is not None else context.options.steps_per_sample
    turns |= {"stage": stage, "settled": steps if settle else 0}
    clock = clock or SteadyStateClock(context.device, steps)
    rows = {name: variant.row for name, variant in variants.items()}
    built: dict[str, Any] = {}
    for number, (name, variant) in enumerate(variants.items()):
        if stage:
            context.progress(f"{stage}, building", number, len(variants))
        _begin(name, variant, context, built)

    def time_together(left: Mapping[str, Any], turn: Callable[[str], object]) -> Samples:
        runs = {name: partial(variants[name].run, training) for name, training in left.items()}
        prepare = {name: partial(variants[name].prepare, training) for name, training in left.items()}
        return samples_in_turns(runs, context, turn, clock, prepare=prepare, **turns)

    guard = partial(failure_on_any_rank_is_a_row, context=context)
    samples = time_what_fits(built, rows, guard, time_together)
    for name in tuple(samples):
        found = dict(rows[name])  # it names the row if a rank gives up
        with guard(found):
            found |= variants[name].check(built[name])
        if found["status"] == "out of memory":
            rows[name].setdefault(UNCHECKED, "after timing: no room for another step")
        elif found["status"] != "ok":
            wrong = without_figures(rows[name]) | {key: found[key] for key in ("status", "detail")}
            rows[name].clear()
            rows[name] |= wrong
            del samples[name]
    built.clear()
    release_memory(context.device)
    return samples


def _begin(name: str, variant: Variant, context: Context, built: dict[str, Any]) -> None:
    """Build a variant, check its first steps, and add it to `built`; its row is then the same on all ranks."""
    import torch
    import torch.distributed as dist

    row, training = variant.row, None
    note = f", with {len(built)} other trainings in memory" if built else ""
    if row["status"] != "ok":
        return
    with failure_on_any_rank_is_a_row(row, context, note):
        training = variant.make()
    if row["status"] == "ok":  # steps are collective: they begin where all ranks have built the variant
        with failure_on_any_rank_is_a_row(row, context, note):
            row |= variant.judge(training)
            if row["status"] == "ok":
                row |= variant.more(training)
    if row["status"] != "ok":
        del training
        release_memory(context.device)
        return
    if context.ranks.world_size > 1:
        of_first: list[Any] = [row]
        dist.broadcast_object_list(of_first, src=0, device=torch.device("cpu"))
        row |= of_first[0]
    built[name] = training


class Memory:
    """Measure the memory of trainings that are alive at once, some of which share their weights."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own: Counter[str] = Counter()
        self._others = 0

    def begin(self, weights: str) -> None:
        """Note what all but the trainings of these weights use, before another one is built."""
        self._others = memory_in_use(self._device) - self._own[weights]

    def peak_gb(self, weights: str, training: Any, run: Callable[[], object]) -> float:
        """Run a step; return the most that the trainings of these weights need, in GB.

        On a CPU the resident set would count what earlier trainings left in the allocator, so weights and optimizer
        state are added up instead, beside what grows during the step.
        """
        self._own[weights] = own = (
            memory_in_use(self._device) - self._others if self._device.type == "cuda" else _bytes_of(training)
        )
        with track_peak(self._device) as peak:
            run()
        return (own + peak.extra_bytes) / GB


def _bytes_of(training: Any) -> int:
    import torch

    state = [value for slots in training.optimizer.state.values() for value in slots.values()]
    tensors = [*training.model.parameters(), *(value for value in state if isinstance(value, torch.Tensor))]
    return sum(tensor.nbytes for tensor in tensors)


def release_freed(ranks: Ranks) -> None:
    """Free the buffers of finished collectives, which would count as memory of another training. Collective."""
    import torch

    from lmkit.parallel.ranks import release_collectives

    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)
        release_collectives(ranks)
        torch.empty(1, device=ranks.device)
    release_memory(ranks.device)


def speed_fields(
    samples_ms: Sequence[float],
    context: Context,
    limits: Limits | None,
    *,
    tokens: int,
    flops: float,
    precision: str,
    ranks: int = 1,
    name: str = "median_ms",
) -> dict[str, Any]:
    """Return times, tokens/s and the MFU of a device.

    Args:
        tokens: of a step of all ranks.
        flops: of a token.
        name: the key of the median.
    """
    fields = time_fields(samples_ms, name)
    tokens_per_s = tokens / (fields[name] * 1e-3)
    mfu = mfu_fields(tokens_per_s * flops / ranks, context.device, precision, limits)
    return fields | {"tokens_per_s": tokens_per_s, **mfu}


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
