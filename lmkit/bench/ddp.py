"""`lmkit bench ddp`: compare every gradient strategy on one model with one GPU and with no communication.

It times the step that `lmkit train` runs, variants interleaved, after it has checked their gradients
(`training_gate`). Each quantity is computed per round and summarized by its median and a 95% interval over rounds:

- step time (ms): the slowest rank's, in every variant;
- one rank: all GPUs train at the same time, each alone with the rows of one rank;
- scaling: step time of one rank / step time with W ranks (weak scaling: the same rows per rank);
- exposed communication (ms): step time - step time without communication (`none`);
- communication alone (ms): the time of a step's reduction while nothing computes;
- host time (ms): how long rank 0's CPU needs to queue a step on an idle GPU;
- host ahead (ms): how long a GPU still works after its host has queued a sample's last step; the smallest over the
  ranks. Near zero, the host sets the step time, not the GPU;
- link bytes: see `Traffic`; "expected" is the formula over the model's parameters.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from lmkit.bench.context import Context
from lmkit.bench.ddp_summary import pictures as pictures
from lmkit.bench.ddp_summary import summarize as summarize
from lmkit.bench.ddp_summary import summarize_sharding as summarize_sharding
from lmkit.bench.ddp_timeline import trace_step
from lmkit.bench.ddp_variants import (
    NAMED,
    SOLO,
    Case,
    Gates,
    RanksOptions,
    baseline_of,
    case_of,
    expected_link_bytes,
    is_own,
    is_sharded,
    make_training,
    parallel_of,
    unfit,
)
from lmkit.bench.failures import failure_on_any_rank_is_a_row
from lmkit.bench.harness import without_figures
from lmkit.bench.turns import host_ms
from lmkit.measure.memory import claim_workspaces, release_memory
from lmkit.measure.statistics import median, paired_ratio, spread
from lmkit.measure.tables import Rows
from lmkit.measure.timing import SteadyStateClock, time_variants, without_garbage_collection
from lmkit.recipe.tables import PositiveFloat
from lmkit.registry import BENCHES, STRATEGIES

if TYPE_CHECKING:
    from lmkit.parallel.ranks import Ranks
    from lmkit.training.setup import TrainingStep

SETTLE_S = 1.5
"""Seconds of untimed steps on all GPUs before the first sample. An idle GPU draws little power, and its power limit
reacts late: without these steps the first samples would be too short and the next ones too long."""


class Options(RanksOptions):
    """`[bench.ddp]`."""

    bucket_sweep_mb: tuple[PositiveFloat, ...] = (1, 10, 100, 1000)
    """Bucket sizes in MiB to compare; empty: no sweep."""
    max_seconds: PositiveFloat = 600.0
    """Seconds of timing for the variants, and as many for the bucket sizes; whole rounds only."""


class Sample(NamedTuple):
    """The measurement of one rank.

    Attributes:
        step_ms: ms per step.
        ahead_ms: ms that the host was ahead of its GPU, see `SteadyStateClock`; NaN on a CPU.
    """

    step_ms: float
    ahead_ms: float


Samples = dict[str, list[list[Sample]]]
"""Variant -> round -> rank."""
Trainings = dict[str, "TrainingStep"]
"""Variant -> its training."""


def ladder() -> tuple[str, ...]:
    """Return the variants that are measured by default: one rank, every strategy, PyTorch's rivals."""
    return ("one rank", *STRATEGIES.names, *(name for name in NAMED if name not in SOLO))


def check(recipe: Any) -> None:
    """Refuse unknown variants and a model without a vocabulary before ranks start."""
    options = recipe.bench_table("ddp")
    case_of(recipe, options, "ddp")
    for name in options.variants:
        parallel_of(name, recipe.parallel)


@BENCHES.register(
    "ddp",
    order=4,
    help="Gradient synchronization: all strategies, and what they cost.",
    recipes=("bench_ddp", "bench_ddp_cpu"),
    ranks="required",
    example="lmkit bench ddp bench_ddp_cpu --nproc 2",
    row_keys=("variant", "case", "world_size"),
)
def ddp(context: Context) -> Rows:
    """Return a row per variant, and those of the bucket sweep, each with its samples."""
    options: Options = context.options
    case = case_of(context.recipe, options, "ddp")
    rows = measure(case, options.variants or ladder(), context, part="ladder")
    sweep = [f"bucketed {mb:.12g} MB" for mb in options.bucket_sweep_mb]
    if sweep:
        # The journal keeps only the ladder; a sweep that was interrupted is measured again.
        rows += measure(case, ("one rank", "none", *sweep), context, part="bucket sweep", journal=False)
    bucketed = next((row for row in rows if row["variant"] == "bucketed" and row["status"] == "ok"), None)
    if bucketed is not None and context.device.type == "cuda":
        traced = trace_step(make_training("bucketed", case, context.ranks), context.ranks)
        release_memory(context.device)
        bucketed |= {"timeline": traced} if traced else {}
    return rows


def measure(case: Case, names: Sequence[str], context: Context, *, part: str, journal: bool = True) -> Rows:
    """Measure variants that fit into memory together. Every rank calls this and gets the same rows.

    A variant that fails, or is wrong, has a `status` that says so. If it failed on one rank before the ranks started
    again, the journal has its row.
    """
    ranks, options = context.ranks, context.options
    claim_workspaces(ranks.device)
    gates = Gates(names, case, ranks)
    release_memory(ranks.device)
    trainings: Trainings = {}
    facts: dict[str, dict[str, Any]] = {
        name: {
            "case": case.recipe.run.name,
            "variant": name,
            "world_size": 1 if name in SOLO else ranks.world_size,
            "part": part,
            "status": "ok",
        }
        for name in names
    }
    for row in context.journal.rows():
        if row["part"] == part and row["status"] != "ok" and row["variant"] in facts:
            facts[row["variant"]] = row
    for number, name in enumerate(names):
        context.progress(f"{part}, building", number, len(names))
        if why := unfit(name, case):
            facts[name] |= {"status": "unsupported", "detail": why}
        if facts[name]["status"] != "ok":
            continue
        if (built := _build(name, case, context, gates, facts[name])) is not None:
            trainings[name] = built

    def rows_of(samples: Samples) -> Rows:
        rows = [
            facts[name] | numbers(name, case, ranks, samples) | {"rounds": options.rounds} for name in names
        ]
        compare_with_expected(rows, case)
        return rows

    def keep(samples: Samples) -> None:
        if journal and ranks.is_first:
            context.journal.replace(rows_of(samples))

    samples: Samples = {}
    trouble: dict[str, Any] = {"status": "failed"}
    while trainings and trouble["status"] != "ok":
        trouble = {"status": "ok"}
        with failure_on_any_rank_is_a_row(trouble, context), without_garbage_collection():
            samples = _time_together(trainings, context, part, keep, trouble)
        if trouble["status"] != "ok":
            del trainings[trouble["variant"]]
            facts[trouble["variant"]] |= trouble
            samples = {}
    for name, training in trainings.items():
        with failure_on_any_rank_is_a_row(facts[name], context):
            facts[name] |= gates.after_timing(name, training)
        if facts[name]["status"] != "ok":
            facts[name] = without_figures(facts[name])
            del samples[name]
    trainings.clear()
    release_memory(ranks.device)
    return rows_of(samples)


def _build(
    name: str, case: Case, context: Context, gates: Gates, facts: dict[str, Any]
) -> TrainingStep | None:
    """Build a variant and check its first steps; add its memory and traffic to `facts`, its row.

    Return None if it fails, or is wrong.
    """
    import torch
    import torch.distributed as dist

    ranks = context.ranks
    on_gpu = ranks.device.type == "cuda"
    built: TrainingStep | None = None
    start = 0
    with failure_on_any_rank_is_a_row(facts, context):
        begin_account(ranks)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(ranks.device)
            start = torch.cuda.memory_allocated(ranks.device)
        built = make_training(name, case, ranks)
    # Steps are collective: they begin where all ranks have built the variant.
    if built is None or facts["status"] != "ok":
        return None
    with failure_on_any_rank_is_a_row(facts, context):
        if on_gpu:
            peak = torch.cuda.max_memory_allocated(ranks.device)
        facts |= gates.judge(name, built)
        if facts["status"] == "ok":
            if on_gpu:
                torch.cuda.reset_peak_memory_stats(ranks.device)  # of reading the weights for the check
            facts |= _one_step(built, name)
            if on_gpu:
                torch.cuda.synchronize(ranks.device)
                facts["peak_bytes"] = max(peak, torch.cuda.max_memory_allocated(ranks.device)) - start
                facts["host_ms"] = host_ms(built.run, ranks.device)
            facts["communication_alone_ms"] = _communication_alone(name, built, ranks)
    if facts["status"] != "ok":
        del built
        release_memory(ranks.device)
        return None
    of_first: list[Any] = [facts]  # so that all ranks return the same rows
    dist.broadcast_object_list(of_first, src=0, device=torch.device("cpu"))
    facts |= of_first[0]
    return built


def begin_account(ranks: Ranks) -> None:
    """Empty the allocator before building a variant whose memory is measured. Collective."""
    import torch

    from lmkit.parallel.ranks import release_collectives

    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)
        release_collectives(ranks)
    release_memory(ranks.device)


def _one_step(built: TrainingStep, name: str) -> dict[str, Any]:
    """Run a step (not the first, which settles the order of buckets); return its loss and traffic."""
    sync = built.step.sync
    sync.traffic.reset()
    loss = built.run()
    facts: dict[str, Any] = {
        "calls_per_step": sync.traffic.calls,
        "payload_bytes": sync.traffic.payload_bytes,
        "link_bytes": sync.traffic.link_bytes,
        "parameter_bytes": sum(p.nbytes for p in built.model.parameters() if p.requires_grad),
        "loss": float(loss),
    }
    if name not in SOLO and sync.gather is not None:
        facts["gather"] = sync.gather
    return facts


def _communication_alone(name: str, built: TrainingStep, ranks: Ranks) -> float | None:
    """Return the median ms of reducing complete gradients; None for strategies that cannot reduce separately."""
    from lmkit.parallel.collectives import agree

    if not is_own(name) or is_sharded(name):
        return None
    built.backward()
    clock, sync = SteadyStateClock(ranks.device, 1), built.step.sync
    with without_garbage_collection():
        samples = [clock.sample_ms(sync.finish, 1, before=[lambda: agree(ranks)]) for _ in range(5)]
    built.optimizer.zero_grad(set_to_none=True)
    return median(samples)


def _time_together(
    trainings: Trainings,
    context: Context,
    part: str,
    keep: Callable[[Samples], None],
    row: dict[str, Any],
) -> Samples:
    """Return interleaved samples; call `keep` with the samples so far after each round.

    Args:
        row: gets the part and the variant whose turn it is.
    """
    import torch
    import torch.distributed as dist

    from lmkit.parallel.collectives import agree

    ranks, options = context.ranks, context.options
    deadline = time.monotonic() + options.max_seconds
    samples: Samples = {name: [] for name in trainings}
    samples_before = count()
    clock = SteadyStateClock(ranks.device, options.steps_per_sample)
    turns: list[str] = []  # variants in the order of this round

    def prepare(name: str) -> None:
        done = next(samples_before)
        row.update(variant=name, part=part)
        context.progress(f"{part}, timing", done, options.rounds * len(trainings))
        if done == 0 and ranks.device.type == "cuda":  # the GPUs were idle while the last variant was built
            settle(trainings[name].run, ranks, options.steps_per_sample)
        turns.append(name)
        agree(ranks)

    def after_round(own: dict[str, float]) -> bool:
        ahead = dict(zip(turns, clock.ahead_ms, strict=True)) if clock.ahead_ms else {}
        turns.clear()
        clock.ahead_ms.clear()
        mine = torch.tensor(
            [(own[name], ahead.get(name, math.nan)) for name in trainings], dtype=torch.float64
        )
        of_rank = [mine.clone() for _ in range(ranks.world_size)]
        if ranks.world_size > 1:
            dist.all_gather(of_rank, mine)
        for number, name in enumerate(trainings):
            samples[name].append([Sample(*each[number].tolist()) for each in of_rank])
        keep(samples)
        return agree(ranks, stop=time.monotonic() > deadline)

    time_variants(
        {name: built.run for name, built in trainings.items()},
        device=ranks.device,
        repeats=options.rounds,
        warmup=0,
        prepare={name: partial(prepare, name) for name in trainings},
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


def numbers(name: str, case: Case, ranks: Ranks, samples: Samples) -> dict[str, Any]:
    """Return the fields of a variant's row that follow from its samples."""
    if name not in samples:
        return {}
    own = _slowest(samples[name])
    times = spread(own)
    world_size = 1 if name in SOLO else ranks.world_size
    fields: dict[str, Any] = {
        "step_ms": times.median,
        "p10_ms": times.p10,
        "p90_ms": times.p90,
        "tokens_per_s": world_size * case.tokens_per_step / times.median * 1e3,
        "samples_ms": own,
    }
    if name in SOLO:  # in other variants ranks wait for one another, so their times are equal
        of_ranks = zip(*samples[name], strict=True)
        fields["rank_ms"] = [median([sample.step_ms for sample in of_rank]) for of_rank in of_ranks]
    if ranks.device.type == "cuda":
        least = [min(sample.ahead_ms for sample in of_rank) for of_rank in samples[name]]
        fields["ahead_ms"] = median(least)
    baseline = baseline_of(name)
    if baseline in samples and name not in SOLO:
        ratio = paired_ratio(own, _slowest(samples[baseline]))
        fields |= {"scaling": ratio.speedup, "scaling_low": ratio.low, "scaling_high": ratio.high}
    if "none" in samples and name not in (*SOLO, "none") and baseline == SOLO[0]:
        exposed = [mine - bare for mine, bare in zip(own, _slowest(samples["none"]), strict=True)]
        fields |= {"exposed_ms": median(exposed), "exposed_share": median(exposed) / times.median}
    return fields


def _slowest(rounds: Sequence[Sequence[Sample]]) -> list[float]:
    """Return the slowest rank's time of each round: that rank ends the step of all."""
    return [max(sample.step_ms for sample in of_rank) for of_rank in rounds]


def compare_with_expected(rows: Rows, case: Case) -> None:
    """Add the peak relative to one rank's with the same weights, and the bytes that the formula expects."""
    peaks = {row["variant"]: row.get("peak_bytes") for row in rows}
    parallel = case.recipe.parallel
    for row in rows:
        alone = peaks.get(baseline_of(row["variant"]))
        if alone and row.get("peak_bytes"):
            row["peak_overhead"] = row["peak_bytes"] / alone - 1.0
        if row.get("parameter_bytes") and row["world_size"] > 1:
            row["expected_link_bytes"] = expected_link_bytes(
                row["variant"], row["parameter_bytes"], row["world_size"], parallel, case.precision
            )
