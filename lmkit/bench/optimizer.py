"""`lmkit bench optimizer`: memory and speed of a step with whole and with sharded optimizer state.

It times the step that `lmkit train` runs, after a check of its first steps (`training_gate`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lmkit.bench.context import Context
from lmkit.bench.ddp import with_units
from lmkit.bench.ddp_variants import (
    SOLO,
    TORCH_ZERO,
    Gates,
    RanksOptions,
    case_of,
    is_own,
    is_sharded,
    parallel_of,
    unfit,
)
from lmkit.bench.harness import mfu_notes
from lmkit.bench.summary import Summary
from lmkit.bench.trainings import measure_figures, speed_fields
from lmkit.errors import UsageError
from lmkit.measure.memory import PeakMemory, claim_workspaces, track_peak
from lmkit.measure.plots import grouped_bars
from lmkit.measure.tables import Column, Rows
from lmkit.registry import BENCHES, STRATEGIES

if TYPE_CHECKING:
    from lmkit.training.setup import TrainingStep


class Options(RanksOptions):
    """`[bench.optimizer]`."""


def default_variants() -> tuple[str, ...]:
    """Return a strategy with whole state, every strategy that shards it (with bf16 weights, too), PyTorch's ZeRO."""
    sharded = [name for name in STRATEGIES.names if is_sharded(name)]
    halved = [f"{name} bf16" for name in sharded if "weights" in STRATEGIES.facts(name).uses]
    return ("bucketed", *sharded, *halved, TORCH_ZERO)


def check(recipe: Any) -> None:
    """Refuse unknown variants, those of one rank, and a model without a vocabulary before ranks start."""
    options = recipe.bench_table("optimizer")
    case_of(recipe, options, "optimizer")
    for name in options.variants:
        parallel_of(name, recipe.parallel, "optimizer")
        if name in SOLO:
            raise UsageError(
                "bench.not_of_all_ranks",
                f"bench.optimizer.variants: {name!r} trains on one rank",
                hint='use "none": its ranks agree on every step, and each holds what one rank would',
            )


@BENCHES.register(
    "optimizer",
    order=5,
    help="Whole against sharded optimizer state: memory and speed.",
    recipes=("bench_ddp", "bench_ddp_cpu"),
    ranks="required",
    example="lmkit bench optimizer bench_ddp_cpu --nproc 2",
    row_keys=("variant", "case", "world_size", "state_bytes"),
)
def optimizer(context: Context) -> Rows:
    """Return one row per variant.

    Each variant is built, measured and dropped before the next, so rounds of variants do not pair; `bench ddp` pairs
    them. Bytes are this rank's. `state_bytes` is the optimizer's state without masters; `state_share` divides it by
    that of the first variant with whole state. The other bytes are those allocated by CUDA (None on a CPU): after
    model and optimizer were made, before the optimizer's step, after it, and at the peak. Times are the slowest
    rank's, in ms.
    """
    from lmkit.model.accounting import flops_per_token

    options, ranks = context.options, context.ranks
    case = case_of(context.recipe, options, "optimizer")
    dtype = options.precision.removesuffix("-autocast")
    limits = context.limits([dtype]) if ranks.is_first else None
    claim_workspaces(ranks.device)
    names = options.variants or default_variants()
    gates = Gates(names, case, ranks)
    flops = flops_per_token(case.model, case.model.context_length)
    work: dict[str, Any] = {
        "tokens": ranks.world_size * case.tokens_per_step,
        "flops": flops,
        "precision": dtype,
        "ranks": ranks.world_size,
    }
    known = {row["variant"]: row for row in context.journal.rows()}  # where the ranks have started again
    rows: Rows = []

    def figures(name: str, samples_ms: list[float]) -> dict[str, Any]:
        told = {"precision": case.precision, "flops_per_token": flops}
        return told | speed_fields(samples_ms, context, limits, name="step_ms", **work)

    for name in context.each("optimizer", names):
        if name in known:
            rows.append(known[name])
            continue
        row = {"case": case.recipe.run.name, "variant": name, "world_size": ranks.world_size}
        row |= {"state_bytes": None, "status": "ok"}
        if why := unfit(name, case):
            row |= {"status": "unsupported", "detail": why}
        variants = {name: gates.variant(name, row, _memory_fields)}
        measure_figures(variants, context, limits, figures, rounds=options.rounds)
        if row["status"] != "ok":
            row["state_bytes"] = None
        rows.append(row)
        context.keep([row])
    whole = next((row["state_bytes"] for row in rows if not is_sharded(row["variant"])), None)
    for row in rows:
        row["state_share"] = row["state_bytes"] / whole if whole and row["state_bytes"] is not None else None
    return rows


def state_bytes(optimizer: Any) -> int:
    """Return the bytes of optimizer state on this rank, without fp32 masters of bf16 weights."""
    import torch

    # PyTorch's ZeroRedundancyOptimizer keeps the state of the parameters dealt to this rank in `optim`.
    states = optimizer.optim.state if hasattr(optimizer, "optim") else optimizer.state_dict()["state"]
    return sum(
        value.nbytes
        for state in states.values()
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and key != "master"
    )


def _memory_fields(name: str, built: TrainingStep, making: PeakMemory) -> dict[str, Any]:
    """Return the memory at some points of a step, after the first, in which state was made."""
    import torch

    device = built.step.ranks.device
    on_gpu = device.type == "cuda"
    points: dict[str, int | None] = {"init_bytes": making.end_bytes - making.start_bytes if on_gpu else None}

    def note(point: str) -> None:
        if on_gpu:
            torch.cuda.synchronize(device)
        points[point] = torch.cuda.memory_allocated(device) - making.start_bytes if on_gpu else None

    with track_peak(device) as peak:
        built.run(before_update=lambda: note("before_step_bytes"))
        note("after_step_bytes")
    points["peak_bytes"] = peak.peak_bytes - making.start_bytes if on_gpu else None
    built.wait_for_weights()
    parameters = sum(p.numel() for p in built.model.parameters())
    return {"parameters": parameters, "state_bytes": state_bytes(built.optimizer), **points}


# Rows in words

STATE = Column("state_mb", "state MB", ",.1f", axis="MB (10^6 bytes)")
COLUMNS = (
    Column("variant", "variant"),
    Column("step_ms", "ms/step", ".2f", instead="status"),
    Column("spread", "spread", ".1%"),
    Column("tokens_per_s", "tokens/s", ",.0f"),
    Column("mfu", "MFU", ".1%"),
    STATE,
    Column("state_share", "of whole", ".1%"),
    Column("init_mb", "init MB", ",.0f"),
    Column("before_step_mb", "before MB", ",.0f"),
    Column("after_step_mb", "after MB", ",.0f"),
)


def summarize(rows: Rows) -> Summary:
    """Say what share of the state and of the peak memory each variant holds."""
    shown = []
    for row in rows:
        keys = [key for key, value in row.items() if key.endswith("_bytes") and value is not None]
        shown.append(with_units(row) | {key.replace("_bytes", "_mb"): row[key] / 1e6 for key in keys})
    return Summary(
        "Optimizer state sharding",
        COLUMNS,
        shown,
        about=f"{rows[0]['case']}, {rows[0]['world_size']} ranks",
        findings=findings(rows),
        notes=(
            "state: what the optimizer holds on this rank, MB (10^6 bytes); init, before, after (GPUs): what the "
            "allocator holds when all is built, before and after an optimizer step; spread: (p90 - p10) / median",
            *mfu_notes(rows),
        ),
        wide=(Column("peak_mb", "peak MB", ",.0f"),),
    )


def findings(rows: Rows) -> list[str]:
    """Return a sentence for each of our sharded variants."""
    found = []
    whole = next((row for row in rows if not is_sharded(row["variant"])), None)
    for row in rows:
        if row["state_bytes"] is None or not is_sharded(row["variant"]) or not is_own(row["variant"]):
            continue
        said = f"{row['variant']}: {row['state_bytes'] / 1e6:,.1f} MB of state on a rank"
        if row.get("state_share") is not None:
            said += (
                f", {row['state_share']:.2%} of the whole (at least {1 / row['world_size']:.2%} plus padding)"
            )
        if whole and whole.get("peak_bytes") and row.get("peak_bytes"):
            saved = row["peak_bytes"] / whole["peak_bytes"] - 1
            said += (
                f"; a step peaks at {row['peak_bytes'] / 1e9:.2f} GB, {saved:+.1%} of {whole['variant']}'s"
            )
        found.append(f"{said}.")
    return found


def pictures(rows: Rows) -> dict[str, bytes]:
    """Draw the state of each rank."""
    shown = [row | {"state_mb": row["state_bytes"] / 1e6} for row in rows if row["state_bytes"] is not None]
    title = f"Optimizer state on each of {rows[0]['world_size']} ranks"
    picture = grouped_bars(shown, STATE, group="variant", title=title, x_label="variant")
    return {"optimizer_state.png": picture}
