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

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from lmkit.bench import trainings
from lmkit.bench.context import Context
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
    is_rounded,
    is_sharded,
    make_training,
    parallel_of,
    unfit,
)
from lmkit.bench.harness import grouped, time_fields
from lmkit.bench.summary import Summary
from lmkit.bench.trainings import Samples, Variant, host_ms, slowest
from lmkit.measure.memory import PeakMemory, claim_workspaces, release_memory, track_peak
from lmkit.measure.plots import grouped_bars, line_panels, of_samples, timeline
from lmkit.measure.ranges import quietly
from lmkit.measure.statistics import FEWEST_PAIRS, clip, median, overlap, paired_ratio, total, union
from lmkit.measure.tables import Column, Rows
from lmkit.measure.timing import SteadyStateClock, without_garbage_collection
from lmkit.measure.trace import DeviceWork
from lmkit.recipe.tables import PositiveFloat
from lmkit.registry import BENCHES, STRATEGIES

if TYPE_CHECKING:
    from lmkit.parallel.ranks import Ranks
    from lmkit.training.setup import TrainingStep

TRACE_WARMUP = 5
TRACE_STEPS = 16  # in the first traced steps the host is not yet ahead of its GPU
Timeline = dict[str, list[tuple[float, float]]]
""""compute" or "communication" -> when its kernels ran: (start, end) in ms since the step's start, merged."""


class Options(RanksOptions):
    """`[bench.ddp]`."""

    bucket_sweep_mb: tuple[PositiveFloat, ...] = (1, 10, 100, 1000)
    """Bucket sizes in MiB to compare; empty: no sweep."""
    max_seconds: PositiveFloat = 600.0
    """Seconds of timing for the variants, and as many for the bucket sizes; whole rounds only."""


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
    known = [row for row in context.journal.rows() if row["part"] == part]
    failed = {row["variant"]: row for row in known if row["status"] != "ok"}
    variants: dict[str, Variant] = {}
    for name in names:
        row: dict[str, Any] = {
            "case": case.recipe.run.name,
            "variant": name,
            "world_size": 1 if name in SOLO else ranks.world_size,
            "part": part,
        }
        why = unfit(name, case)
        row |= {"status": "unsupported", "detail": why} if why else {"status": "ok"}
        variants[name] = gates.variant(name, failed.get(name, row), _first_facts)

    def rows_of(samples: Samples) -> Rows:
        rows = [
            each.row | numbers(name, case, ranks, samples) | {"rounds": options.rounds}
            for name, each in variants.items()
        ]
        compare_with_expected(rows, case)
        return rows

    def keep(samples: Samples) -> None:
        if journal and ranks.is_first:
            context.journal.replace(rows_of(samples))

    limits = {"rounds": options.rounds, "max_seconds": options.max_seconds}
    return rows_of(trainings.measure(variants, context, stage=part, settle=True, keep=keep, **limits))


def _first_facts(name: str, built: TrainingStep, peak: PeakMemory) -> dict[str, Any]:
    """Run a step (not the first, which settles the order of buckets); return its loss, traffic, memory, host time.

    Args:
        peak: of making the training.
    """
    ranks, sync = built.step.ranks, built.step.sync
    on_gpu = ranks.device.type == "cuda"
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
    if on_gpu:
        facts["peak_bytes"] = max(peak.peak_bytes, of_step.peak_bytes) - peak.start_bytes
        facts["host_ms"] = host_ms(built.run, ranks.device)
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


def numbers(name: str, case: Case, ranks: Ranks, samples: Samples) -> dict[str, Any]:
    """Return the fields of a variant's row that follow from its samples."""
    if name not in samples:
        return {}
    own = slowest(samples[name])
    fields = time_fields(own, "step_ms")
    world_size = 1 if name in SOLO else ranks.world_size
    fields["tokens_per_s"] = world_size * case.tokens_per_step / fields["step_ms"] * 1e3
    if name in SOLO:  # in other variants ranks wait for one another, so their times are equal
        of_ranks = zip(*samples[name], strict=True)
        fields["rank_ms"] = [median([sample.ms for sample in of_rank]) for of_rank in of_ranks]
    if ranks.device.type == "cuda":
        least = [min(sample.ahead_ms for sample in of_rank) for of_rank in samples[name]]
        fields["ahead_ms"] = median(least)
    baseline = baseline_of(name)
    if baseline in samples and name not in SOLO:
        ratio = paired_ratio(own, slowest(samples[baseline]))
        fields |= {"scaling": ratio.speedup, "scaling_low": ratio.low, "scaling_high": ratio.high}
    if "none" in samples and name not in (*SOLO, "none") and baseline == SOLO[0]:
        exposed = [mine - bare for mine, bare in zip(own, slowest(samples["none"]), strict=True)]
        fields |= {"exposed_ms": median(exposed), "exposed_share": median(exposed) / fields["step_ms"]}
    return fields


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


# One step, from a trace


def trace_step(built: TrainingStep, ranks: Ranks) -> Timeline | None:
    """Trace steps (every rank calls this, on GPUs) and return the last but one; None on ranks other than 0.

    Only rank 0 is traced. Tracing slows down its host, so the other ranks wait for rank 0, and the traced time of its
    collectives contains no waiting.
    """
    import torch

    from lmkit.measure.trace import chrome_trace, parse_chrome_trace
    from lmkit.parallel.collectives import agree

    for _ in range(TRACE_WARMUP):
        built.run()
    torch.cuda.synchronize(ranks.device)
    agree(ranks)
    tracing = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    with quietly(tracing) if ranks.is_first else nullcontext() as profiler:
        for _ in range(TRACE_STEPS):
            built.run()
        torch.cuda.synchronize(ranks.device)
    if profiler is None:
        return None
    trace = parse_chrome_trace(json.loads(chrome_trace(profiler)), "bench ddp")
    return read_step(trace.work or (), TRACE_STEPS)


def read_step(work: Sequence[DeviceWork], steps: int) -> Timeline | None:
    """Return the last but one of `steps` steps; None without collectives (the profiler may not be allowed to see
    kernels).

    A step begins at the end of the previous step's last collective and ends at the end of its own.

    Raises:
        ValueError: the steps did not make equally many collectives.
    """
    spans: dict[str, list[tuple[int, int]]] = {"compute": [], "communication": []}
    for item in work:
        spans["communication" if item.is_communication else "compute"].append((item.start, item.end))
    collectives = sorted(spans["communication"])
    if not collectives:
        return None
    if len(collectives) % steps:
        raise ValueError(f"{len(collectives)} collectives in {steps} steps: not the same number in each")
    per_step = len(collectives) // steps
    begin, finish = (max(end for _, end in collectives[: n * per_step]) for n in (steps - 2, steps - 1))
    return {
        kind: [
            ((start - begin) / 1e6, (end - begin) / 1e6) for start, end in union(clip(of_kind, begin, finish))
        ]
        for kind, of_kind in spans.items()
    }


TIME = Column("step_ms", "ms/step", ".2f", instead="status", axis="ms per step")
THROUGHPUT = Column("tokens_per_s", "tokens/s", ",.0f", axis="tokens per second")
EXPOSED = Column("exposed_ms", "exposed ms", ".2f", axis="ms per step")
COLUMNS = (
    Column("variant", "variant"),
    TIME,
    Column("spread", "spread", ".1%"),
    THROUGHPUT,
    Column("scaling", "scaling", ".1%"),
    EXPOSED,
    Column("peak_overhead", "memory", "+.1%"),
    Column("calls_per_step", "calls", ",d"),
    Column("link_mb", "MB sent", ",.1f"),
    Column("expected_mb", "formula", ",.1f"),
)
WIDE = (
    Column("scaling_low", "scaling 95% from", ".1%"),
    Column("scaling_high", "to", ".1%"),
    Column("exposed_share", "exposed share", ".1%"),
    Column("communication_alone_ms", "alone ms", ".2f"),
    Column("host_ms", "host ms", ".1f"),
    Column("ahead_ms", "ahead ms", ".1f"),
    Column("peak_gb", "peak GB", ".2f"),
)
NOTES = (
    "ms/step: median of the slowest rank's samples; under `one rank` every rank trains alone; spread: "
    "(p90 - p10) / median; scaling: step time of one rank / step time of the variant, same rows per rank; "
    "exposed: step time - step time of `none`; memory: peak relative to one rank's",
    "MB sent: 10^6 bytes per rank and step; formula: 2 (W-1)/W of the gradients' bytes; for PyTorch's ZeRO also "
    "(W-1)/W of the weights' bytes; what Muon sends besides of sharded matrices is not in it",
)
BUCKET_MB = re.compile(r"bucketed ([\d.e+-]+) MB")


def summarize(rows: Rows) -> Summary:
    """Say what the rows support: the fastest, against PyTorch, what overlap hides, bytes, bucket sizes."""
    # The sweep measures "one rank" and "none" again only to compare with them.
    shown = [
        with_units(row)
        for row in rows
        if row.get("part") != "bucket sweep" or row["variant"].startswith("bucketed")
    ]
    cases = grouped(shown, lambda row: str(row["case"]))
    timed = [row for row in rows if row.get("samples_ms")]
    notes = list(NOTES)
    if timed and (fewest := min(len(row["samples_ms"]) for row in timed)) < (timed[0].get("rounds") or 0):
        notes.append(f"{fewest} of {timed[0]['rounds']} rounds: then bench.ddp.max_seconds was over")
    if any(len(row["samples_ms"]) < FEWEST_PAIRS for row in timed):
        notes.append(f"fewer than {FEWEST_PAIRS} rounds give no 95% interval: differences may be chance")
    return Summary(
        "Data parallelism",
        COLUMNS if len(cases) < 2 else (Column("case", "case"), *COLUMNS),
        shown,
        about=f"{', '.join(cases)}, {max(row['world_size'] for row in rows)} ranks",
        findings=[found for members in cases.values() for found in findings(members)],
        notes=notes,
        wide=WIDE,
    )


def summarize_sharding(rows: Rows) -> Summary:
    """Say what sharding does to the speed: sharded variants, one rank and `bucketed`; nothing without sharded."""
    names = {row["variant"] for row in rows}
    if not any(is_sharded(name) for name in names):
        return Summary("Speed", (), [])
    kept = {name for name in names if is_sharded(name) or name.startswith("one rank") or name == "bucketed"}
    return summarize([row for row in rows if row["variant"] in kept])


def with_units(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with megabytes and gigabytes."""
    keys = {
        "link_mb": ("link_bytes", 1e6),
        "expected_mb": ("expected_link_bytes", 1e6),
        "peak_gb": ("peak_bytes", 1e9),
    }
    sizes = {key: row[source] / unit for key, (source, unit) in keys.items() if row.get(source) is not None}
    spread = {"spread": (row["p90_ms"] - row["p10_ms"]) / row["step_ms"]} if row.get("step_ms") else {}
    return row | spread | sizes


def findings(rows: Rows) -> list[str]:
    """Return the sentences that the rows of one case support."""
    timed: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row.get("step_ms"):
            timed.setdefault(row["variant"], row)  # the ladder's, if the bucket sweep has the same variant
    synced = [row for name, row in timed.items() if row["world_size"] > 1 and name != "none"]
    found = []
    if full_precision := [row for row in synced if not is_rounded(row["variant"])]:
        best = min(full_precision, key=lambda row: row["step_ms"])
        scaling = f", {best['scaling']:.1%} of linear scaling" if best.get("scaling") else ""
        found.append(
            f"Fastest without a bf16 option: {best['variant']}, {best['step_ms']:.2f} ms a step{scaling}."
        )
    for sharded in (False, True):
        found += _against_pytorch([row for row in synced if is_sharded(row["variant"]) is sharded])
    naive, bucketed = timed.get("naive"), timed.get("bucketed")
    if naive and bucketed and naive.get("exposed_ms") and bucketed.get("exposed_ms") is not None:
        found.append(
            f"Overlap: {bucketed['exposed_ms']:.2f} ms of bucketed's communication lengthen the step; "
            f"{naive['exposed_ms']:.2f} ms of naive's do."
        )
    if counted := [row for row in synced if row.get("expected_link_bytes") and row.get("link_bytes")]:
        apart = max(abs(row["link_bytes"] / row["expected_link_bytes"] - 1) for row in counted)
        found.append(
            f"Bytes: what {len(counted)} variants sent differs from the formula by at most {apart:.2%}."
        )
    sizes = sorted((row for row in synced if _bucket_mb(row) is not None), key=lambda row: row["step_ms"])
    if len(sizes) > 1:
        said = [f"{_bucket_mb(row):g} MB ({row['step_ms']:.2f} ms)" for row in (sizes[0], sizes[-1])]
        found.append(f"Bucket size: best {said[0]}, worst {said[1]}.")
    return found


def _against_pytorch(rows: Rows) -> list[str]:
    """Compare our fastest variant with PyTorch's fastest, by the ratios of the same rounds."""
    ours = [row for row in rows if is_own(row["variant"]) and _bucket_mb(row) is None]
    rivals = [row for row in rows if not is_own(row["variant"])]
    if not ours or not rivals:
        return []
    best, rival = (min(members, key=lambda row: row["step_ms"]) for members in (ours, rivals))
    if len(best["samples_ms"]) != len(rival["samples_ms"]):
        return []
    ratio = paired_ratio(best["samples_ms"], rival["samples_ms"])
    return [f"{best['variant']} against {rival['variant']}: {ratio}."]


def _bucket_mb(row: Mapping[str, Any]) -> float | None:
    size = BUCKET_MB.fullmatch(row["variant"])
    return float(size[1]) if size else None


def pictures(rows: Rows) -> dict[str, bytes]:
    """Draw throughput, exposed communication, the bucket sweep, and a step of `bucketed` if one was traced."""
    timed = [row for row in rows if row.get("step_ms")]
    first = [row for row in timed if row.get("part") != "bucket sweep"]
    case = f"{', '.join(dict.fromkeys(str(row['case']) for row in rows))}, whiskers p10 to p90"
    size = max(row["world_size"] for row in rows)
    by_variant: dict[str, Any] = {"group": "variant", "x_label": "variant"}
    title = f"Training throughput on {size} ranks: {case}"
    files = {"ddp_throughput.png": grouped_bars(first, THROUGHPUT, title=title, **by_variant)}
    if exposed := [row for row in first if row.get("exposed_ms") is not None]:
        bare = next(row for row in first if row["variant"] == "none")["samples_ms"]

        def beyond(row: Mapping[str, Any]) -> tuple[float, float]:
            return of_samples([mine - alone for mine, alone in zip(row["samples_ms"], bare, strict=True)])

        title = f"Communication that compute does not hide: {case}"
        files["ddp_exposed.png"] = grouped_bars(exposed, EXPOSED, whisker=beyond, title=title, **by_variant)
    if sized := [row | {"bucket_mb": size} for row in timed if (size := _bucket_mb(row)) is not None]:
        title = f"Step time over bucket size: {case}"
        files["ddp_bucket_sweep.png"] = line_panels(
            sized, "bucket_mb", TIME, group=lambda row: "bucketed", title=title, x_label="bucket size (MiB)"
        )
    if traced := next((row["timeline"] for row in rows if row.get("timeline")), None):
        kinds = ("compute", "communication")
        compute, communication = ([(start, end) for start, end in traced[kind]] for kind in kinds)
        files["ddp_overlap.png"] = timeline(
            {"compute": compute, "communication": communication},
            title=f"bucketed: {total(communication):.2f} ms of communication in a step, "
            f"{overlap(communication, compute):.2f} of them while compute runs",
            x_label="time (ms), GPU of the traced rank",
        )
    return files
