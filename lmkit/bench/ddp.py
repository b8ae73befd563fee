"""`lmkit bench ddp`: compare every gradient strategy on one model with one GPU and with no communication.

It times the step that `lmkit train` runs, variants interleaved, after it has checked their gradients
(`training_gate`). Each quantity is computed per round and summarized by its median and a 95% interval over rounds:

- step time (ms): the slowest rank's, in every variant;
- one rank: all GPUs train at the same time, each alone with the rows of one rank;
- scaling: step time of one rank / step time with W ranks (weak scaling: the same rows per rank);
- exposed communication (ms): step time - step time without communication (`none`);
- communication alone (ms): the time of a step's reduction while nothing computes;
- host time (ms): how long rank 0's CPU needs to queue a step on an idle GPU;
- link bytes: see `Traffic`; "expected" is the formula over the model's parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lmkit.bench import trainings
from lmkit.bench.context import Context
from lmkit.bench.ddp_variants import (
    NAMED,
    SOLO,
    First,
    RanksOptions,
    baseline_of,
    case_of,
    expected_link_bytes,
    is_own,
    is_rounded,
    is_sharded,
    parallel_of,
    reference_of,
    synchronizes,
    tables_of,
    unfit,
    variant_of,
)
from lmkit.bench.harness import add_figures
from lmkit.bench.trainings import SPREAD, Samples, Variant, host_fields, speed_fields
from lmkit.measure.limits import Limits
from lmkit.measure.memory import PeakMemory, claim_workspaces, release_memory, track_peak
from lmkit.measure.statistics import median, paired_ratio
from lmkit.measure.tables import Column, Rows, grouped
from lmkit.measure.timing import SteadyStateClock, without_garbage_collection
from lmkit.recipe.tables import PositiveFloat
from lmkit.registry import BENCHES, STRATEGIES

if TYPE_CHECKING:
    from lmkit.bench.training_gate import Reference
    from lmkit.parallel.ranks import Ranks
    from lmkit.recipe.recipe import Recipe
    from lmkit.training.setup import TrainingStep


class Options(RanksOptions):
    """`[bench.ddp]`."""

    bucket_sweep_mb: tuple[PositiveFloat, ...] = (1, 10, 100, 1000)
    """Bucket sizes in MiB to compare; empty: no sweep."""


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
        context.keep(rows)
        rows += measure(case, ("one rank", "none", *sweep), context, part="bucket sweep")
    return rows


def measure(
    case: Recipe,
    names: Sequence[str],
    context: Context,
    *,
    part: str,
    seen: Reference | None = None,
    more: First | None = None,
) -> Rows:
    """Return the rows of variants, equal on all ranks; the journal has those that failed before a new start.

    Args:
        seen: of `reference_of`; None: made here.
        more: what is measured of each before it is timed, in place of `_first_facts`.
    """
    ranks, options = context.ranks, context.options
    claim_workspaces(ranks.device)
    limits = context.known_limits([options.precision.removesuffix("-autocast")])
    seen = reference_of(names, case, ranks) if seen is None else seen
    release_memory(ranks.device)
    known = [row for row in context.journal.rows() if row.get("part") == part and row["status"] != "ok"]
    failed = {row["variant"]: row for row in known}
    variants: dict[str, Variant] = {}
    for name in names:
        row: dict[str, Any] = {"case": case.run.name, "variant": name, "part": part, "rounds": options.rounds}
        row["world_size"] = 1 if name in SOLO else ranks.world_size
        if why := unfit(name, case):
            row |= {"status": "unsupported", "detail": why}
        variants[name] = variant_of(name, failed.get(name, row), case, ranks, seen, more or _first_facts)

    samples = trainings.measure(variants, context, stage=part, settled=options.steps_per_sample)
    for name in samples:
        add_figures(variants[name].row, limits, partial(numbers, name, case, context, limits, samples))
    rows = [variant.row for variant in variants.values()]
    compare_with_expected(rows, case)
    return rows


def _first_facts(name: str, built: TrainingStep, peak: PeakMemory) -> dict[str, Any]:
    """Run a step (not the first, which settles the order of buckets); return its loss, traffic, memory, host time;
    `peak` is of making the training."""
    ranks, sync = built.step.ranks, built.step.sync
    sync.traffic.reset()
    with track_peak(ranks.device) as of_step:
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
    if ranks.device.type == "cuda":
        facts["peak_bytes"] = max(peak.peak_bytes, of_step.peak_bytes) - peak.start_bytes
    facts |= host_fields(built.run, ranks.device)
    return facts | {"communication_alone_ms": _communication_alone(name, built, ranks)}


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


def numbers(
    name: str, case: Recipe, context: Context, limits: Limits | None, samples: Samples
) -> dict[str, Any]:
    """Return the fields of a variant's row that follow from its samples."""
    from lmkit.model.accounting import flops_per_token

    ranks, own = context.ranks, samples[name]
    world_size = 1 if name in SOLO else ranks.world_size
    model, train = tables_of(case)
    length, precision = model.context_length, train.precision.removesuffix("-autocast")
    tokens, flops = world_size * train.batch_size * length, flops_per_token(model, length)
    work: dict[str, Any] = {"tokens": tokens, "flops": flops, "precision": precision, "ranks": world_size}
    fields = speed_fields(own, context, limits, name="step_ms", **work)
    baseline = baseline_of(name)
    if baseline in samples and name not in SOLO:
        ratio = paired_ratio(own, samples[baseline])
        fields |= {"scaling": ratio.speedup, "scaling_low": ratio.low, "scaling_high": ratio.high}
    if "none" in samples and name not in (*SOLO, "none") and baseline == SOLO[0]:
        exposed = [mine - bare for mine, bare in zip(own, samples["none"], strict=True)]
        fields |= {"exposed_ms": median(exposed), "exposed_share": median(exposed) / fields["step_ms"]}
    return fields


def compare_with_expected(rows: Rows, case: Recipe) -> None:
    """Add the peak relative to one rank's with the same weights, and the bytes that the formula expects."""
    peaks = {row["variant"]: row.get("peak_bytes") for row in rows}
    precision = tables_of(case)[1].precision
    for row in rows:
        alone = peaks.get(baseline_of(row["variant"]))
        if alone and row.get("peak_bytes"):
            row["peak_overhead"] = row["peak_bytes"] / alone - 1.0
        if row.get("parameter_bytes") and row["world_size"] > 1:
            row["expected_link_bytes"] = expected_link_bytes(
                row["variant"], row["parameter_bytes"], row["world_size"], case.parallel, precision
            )


TITLE, EACH = "Data parallelism", "case"
ABOUT = ("case",)
COLUMNS = (
    Column("variant", "variant"),
    Column("step_ms", "ms/step", ".2f", instead="status", better="lower", axis="ms per step"),
    SPREAD,
    Column("tokens_per_s", "tokens/s", ",.0f"),
    Column("mfu", "MFU", ".1%"),
    Column("scaling", "scaling", ".1%"),
    Column("exposed_ms", "exposed ms", ".2f"),
    Column("peak_overhead", "memory", "+.1%"),
    Column("calls_per_step", "calls", ",d"),
    Column("link_bytes", "MB sent", ",.1f", scale=1e6),
    Column("expected_link_bytes", "formula", ",.1f", scale=1e6),
    Column("case", "case", wide=True),
    Column("world_size", "ranks", wide=True),
    Column("scaling_low", "scaling 95% from", ".1%", wide=True),
    Column("scaling_high", "to", ".1%", wide=True),
    Column("exposed_share", "exposed share", ".1%", wide=True),
    Column("communication_alone_ms", "alone ms", ".2f", wide=True),
    Column("host_ms", "host ms", ".1f", wide=True),
    Column("peak_bytes", "peak GB", ".2f", scale=1e9, wide=True),
)
NOTES = (
    "ms/step: median of the slowest rank's samples; under `one rank` every rank trains alone; scaling: step time of "
    "one rank / step time of the variant, same rows per rank; exposed: step time - step time of `none`; memory: peak "
    "relative to one rank's",
    "MB sent: 10^6 bytes per rank and step; formula: 2 (W-1)/W of the gradients' bytes; for PyTorch's ZeRO also "
    "(W-1)/W of the weights' bytes; what Muon sends besides of sharded matrices is not in it",
)


def shown(rows: Rows) -> Rows:
    """Return the rows but those that the sweep measures again only to compare with them."""
    return [row for row in rows if row.get("part") != "bucket sweep" or row["variant"].startswith("bucketed")]


def competes(row: Mapping[str, Any]) -> bool:
    """Return whether a row is of ranks that train one model together, in full precision."""
    return synchronizes(row["variant"]) and not is_rounded(row["variant"])


def findings(rows: Rows) -> list[str]:
    """Compare our fastest variant with PyTorch's fastest, by the ratios of the same rounds; also of sharded ones."""
    found = []
    timed = [row for row in rows if row.get("step_ms") and synchronizes(row["variant"])]
    for members in grouped(timed, lambda row: (row["case"], is_sharded(row["variant"]))).values():
        ladder = [row for row in members if row.get("part") != "bucket sweep"]
        ours, theirs = ([row for row in ladder if is_own(row["variant"]) is own] for own in (True, False))
        if ours and theirs:
            best, rival = (min(of, key=lambda row: row["step_ms"]) for of in (ours, theirs))
            if len(best["samples_ms"]) == len(rival["samples_ms"]):
                ratio = paired_ratio(best["samples_ms"], rival["samples_ms"])
                found.append(f"{best['variant']} against {rival['variant']}: {ratio}.")
    return found
