"""The engine of `bench model`, `step`, `ddp`, `optimizer` and `lm-matrix`, and of `bench generate`.

A bench describes its variants (`Variant`). `measure` builds each and checks its first steps, times the right ones in
turns, and checks them again. A variant that fails, does not fit or is wrong becomes a row on every rank.
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
from typing import TYPE_CHECKING, Any

from lmkit.bench.context import Context
from lmkit.bench.failures import failure_on_any_rank_is_a_row
from lmkit.bench.harness import add_figures, ratio_fields, time_fields, without_figures
from lmkit.bench.summary import UNCHECKED
from lmkit.measure.limits import Limits, mfu_fields
from lmkit.measure.memory import GB, PeakMemory, memory_in_use, release_memory, track_peak
from lmkit.measure.statistics import paired_ratio
from lmkit.measure.tables import Column
from lmkit.measure.timing import Clock, SteadyStateClock, time_variants, without_garbage_collection

if TYPE_CHECKING:
    import torch

    from lmkit.parallel.ranks import Ranks


@dataclass
class Variant:
    """A training, or a model that writes, that a bench times.

    Attributes:
        row: what identifies it; with a status other than "ok" it is not built.
        make: builds the training; without collectives.
        judge: makes its first steps; returns fields with a status.
        fill: makes the steps of a right training whose peak of memory is the row's `peak_gb`; None: not measured.
        weights: the trainings of this name share their weights, and are one in `peak_gb`.
        more: returns what else is measured before it is timed; of the training, and the memory of making it.
        prepare: called before each sample, untimed.
        run: makes one step, or the part of a step that is timed.
        check: returns status and detail if the training is wrong after it was timed, else {}.
    """

    row: dict[str, Any]
    make: Callable[[], Any]
    judge: Callable[[Any], dict[str, Any]] = lambda training: {}
    fill: Callable[[Any], object] | None = None
    weights: str = ""
    more: Callable[[Any, PeakMemory], dict[str, Any]] = lambda training, making: {}
    prepare: Callable[[Any], object] | None = None
    run: Callable[[Any], object] = lambda training: training.run()
    check: Callable[[Any], dict[str, Any]] = lambda training: {}


def measure_figures(
    variants: Mapping[str, Variant],
    context: Context,
    limits: Limits | None,
    figures: Callable[[str, Any], dict[str, Any]],
    **options: Any,
) -> dict[str, Any]:
    """Measure variants (options: of `measure`), add figures to their rows, and say how many times as fast the variant
    `versus` of a row is. Return the samples of rows whose figures are believed."""
    believed = {
        name: samples
        for name, samples in measure(variants, context, **options).items()
        if add_figures(variants[name].row, limits, partial(figures, name, samples))
    }
    for name, samples in believed.items():
        row = variants[name].row
        if (first := row.get("versus")) in believed and first != name:
            row |= ratio_fields(paired_ratio(believed[first], samples), "first_is")
    return believed


def measure(
    variants: Mapping[str, Variant],
    context: Context,
    *,
    stage: str = "",
    take: Callable[[Steps, Steps, Callable[[str], object]], dict[str, Any]] | None = None,
    **turns: Any,
) -> dict[str, Any]:
    """Measure variants that fit into memory together; return the samples of the right ones. Collective.

    Args:
        take: replaces `samples_in_turns`: of runs, preparations, and what to call at each turn.
        turns: arguments of `samples_in_turns`. Without a clock, the options say `rounds` and `max_seconds`,
            and a sample is their `steps_per_sample` steps in steady state.
    """
    rows = {name: variant.row for name, variant in variants.items()}
    built: dict[str, Any] = {}
    owned: Counter[str] = Counter()
    for number, (name, variant) in enumerate(variants.items()):
        if stage:
            context.progress(f"{stage}, building", number, len(variants))
        variant.row.setdefault("status", "ok")
        variant.row.setdefault("detail", "")
        _begin(name, variant, context, built, owned)

    def time_together(left: Mapping[str, Any], turn: Callable[[str], object]) -> dict[str, Any]:
        runs = {name: partial(variants[name].run, training) for name, training in left.items()}
        ways = {name: variants[name].prepare for name in left}
        prepare = {name: partial(way, left[name]) for name, way in ways.items() if way is not None}
        if take is not None:
            return take(runs, prepare, turn)
        if "clock" not in turns:
            turns["clock"] = SteadyStateClock(context.device, context.options.steps_per_sample)
            turns.update((key, getattr(context.options, key)) for key in ("rounds", "max_seconds"))
        return samples_in_turns(runs, context, turn, prepare=prepare, stage=stage, **turns)

    samples = time_what_fits(built, rows, context, time_together)
    for name in tuple(samples):
        found = dict(rows[name])  # it names the row if a rank gives up
        with failure_on_any_rank_is_a_row(found, context):
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


def _begin(name: str, variant: Variant, context: Context, built: dict[str, Any], owned: Counter[str]) -> None:
    """Build a variant, check its first steps, and add it to `built`; its row is then the same on all ranks.

    `owned`: name of weights -> bytes of their trainings so far.
    """
    import torch
    import torch.distributed as dist

    row, training, device = variant.row, None, context.device
    note = f", with {len(built)} other trainings in memory" if built else ""
    if row["status"] != "ok":
        return
    with failure_on_any_rank_is_a_row(row, context, note):
        release_freed(context.ranks)
        with track_peak(device) as making:
            training = variant.make()
    if row["status"] == "ok":  # steps are collective: they begin where all ranks have built the variant
        with failure_on_any_rank_is_a_row(row, context, note):
            row |= variant.judge(training)
            if row["status"] == "ok" and variant.fill is not None:
                release_freed(context.ranks)
                weights = variant.weights or name
                others = making.start_bytes - owned[weights]
                on_gpu = device.type == "cuda"
                owned[weights] = memory_in_use(device) - others if on_gpu else _bytes_of(training)
                with track_peak(device) as peak:
                    variant.fill(training)
                row["peak_gb"] = (owned[weights] + peak.extra_bytes) / GB
            if row["status"] == "ok":
                row |= variant.more(training, making)
    if row["status"] != "ok":
        del training
        release_memory(device)
        return
    if context.ranks.world_size > 1:
        of_first: list[Any] = [row]
        dist.broadcast_object_list(of_first, src=0, device=torch.device("cpu"))
        row |= of_first[0]
    built[name] = training


def time_what_fits(
    built: dict[str, Any],
    rows: Mapping[str, dict[str, Any]],
    context: Context,
    time_together: Callable[[Mapping[str, Any], Callable[[str], object]], dict[str, Any]],
) -> dict[str, Any]:
    """Time variants in turns. A variant that fails on any rank becomes a row, and the others are timed again.

    If they do not fit together, the one that needs most (`peak_gb` or `peak_bytes` of its row) fails. Collective.

    Args:
        built: variants; those that fail are removed.
        time_together: times variants, and calls a function with the name of each as its turn comes.
    """
    while built:
        trouble: dict[str, Any] = {"status": "ok"}
        turns: list[str] = []
        samples: dict[str, Any] = {}

        def turn(name: str) -> None:
            turns.append(name)  # noqa: B023 (called in this pass of the loop)
            trouble.update(rows[name])  # noqa: B023

        with failure_on_any_rank_is_a_row(trouble, context):
            samples = time_together(built, turn)
        if trouble["status"] == "ok":
            return samples
        sizes = {name: rows[name].get("peak_gb") or rows[name].get("peak_bytes") or 0.0 for name in built}
        is_full = trouble["status"] == "out of memory" and any(sizes.values())
        gone = turns[-1] if turns and not is_full else max(sizes, key=lambda name: sizes[name])
        del built[gone]
        together = f"in turns with {len(built)} others: " if trouble["status"] == "out of memory" else ""
        rows[gone] |= {"status": trouble["status"], "detail": together + trouble["detail"]}
    return {}


def _bytes_of(training: Any) -> int:
    """Return the bytes of weights and optimizer state: a CPU's resident set counts what earlier trainings left."""
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
    """Return times, tokens/s and, where limits were measured, the MFU of a device.

    Args:
        tokens: of a step of all ranks.
        flops: of a token.
    """
    fields = time_fields(samples_ms, name)
    tokens_per_s = tokens / (fields[name] * 1e-3)
    fields["tokens_per_s"] = tokens_per_s
    if limits is not None:
        fields |= mfu_fields(tokens_per_s * flops / ranks, context.device, precision, limits)
    return fields


HOST_STEPS = 5
SETTLE_S = 1.5
"""Seconds of untimed steps before the first sample: the power limit of an idle GPU reacts late, so that the first
samples would be too short and the next ones too long."""
SPREAD = Column("spread", "spread", ".1%", note="(p90 - p10) / median")
_FIRST_IS = "how many times as fast the first variant is, the median over rounds"


def interval(key: str, form: str) -> tuple[Column, Column]:
    """Return the columns of the ends of an interval, in reports alone; see `harness.ratio_fields`."""
    return Column(f"{key}_low", "95% from", form, wide=True), Column(f"{key}_high", "to", form, wide=True)


COMPARISON = (
    Column("first_is", "first x", ".3f", note=_FIRST_IS),
    *interval("first_is", ".3f"),
    Column("verdict", "verdict", wide=True),
)
"""The columns of rows that are compared with the first variant."""
Steps = Mapping[str, Callable[[], object]]
Samples = dict[str, list[float]]
"""Variant -> round -> milliseconds per step of the slowest rank, which ends the step of all."""


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
) -> Samples:
    """Return the samples of the slowest rank; every round has one of each variant. Collective.

    Args:
        turn: called with the name of a variant before each of its samples, untimed, and then `prepare`.
        max_seconds: no round starts after so many seconds of any rank.
        settled: steps at a time for `SETTLE_S` seconds before the first sample on GPUs; 0: none.
    """
    from lmkit.parallel.collectives import agree, largest_of_ranks

    ranks, samples, done = context.ranks, Samples({name: [] for name in steps}), count()
    deadline = time.monotonic() + max_seconds

    def begin(name: str) -> None:
        turn(name)
        number = next(done)
        if stage:
            context.progress(f"{stage}, timing", number, rounds * len(steps))
        if number == 0 and settled and ranks.device.type == "cuda":  # idle while the last variant was built
            settle(steps[name], ranks, settled)
        if prepare is not None and name in prepare:
            prepare[name]()
        agree(ranks)

    def after_round(own: dict[str, float]) -> bool:
        slowest = largest_of_ranks([own[name] for name in steps], ranks)
        for name, sample_ms in zip(steps, slowest, strict=True):
            samples[name].append(sample_ms)
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


def settle(run: Callable[[], object], ranks: Ranks, steps: int) -> None:
    """Run steps for `SETTLE_S` seconds. Collective."""
    import torch

    from lmkit.parallel.collectives import agree

    until = time.perf_counter() + SETTLE_S
    while not agree(ranks, stop=time.perf_counter() > until):
        for _ in range(steps):
            run()
        torch.cuda.synchronize(ranks.device)


def host_fields(step: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Return the median ms until a step on an idle GPU returns to the host, its waits included; {} on a CPU."""
    import torch

    if device.type != "cuda":
        return {}
    found = []
    with without_garbage_collection():
        for _ in range(HOST_STEPS):
            torch.cuda.synchronize(device)
            began = time.perf_counter()
            step()
            found.append((time.perf_counter() - began) * 1e3)
    torch.cuda.synchronize(device)
    return {"host_ms": median(found)}
