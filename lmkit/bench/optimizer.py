"""`lmkit bench optimizer`: whole against sharded optimizer state: memory at each point of a step, and speed.

What is timed is the step that `lmkit train` runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lmkit.bench.ddp import (
    COLUMNS as DDP_COLUMNS,
)
from lmkit.bench.ddp import (
    SOLO,
    SPREAD_NOTE,
    Case,
    Loop,
    RanksOptions,
    begin_account,
    case_of,
    filled,
    is_sharded,
    parse_name,
    with_units,
)
from lmkit.bench.harness import Context, slowest_rank, without_garbage_collection
from lmkit.bench.report import Summary, grouped
from lmkit.errors import UsageError
from lmkit.measure.limits import model_flops_utilization
from lmkit.measure.memory import claim_workspaces
from lmkit.measure.plots import grouped_bars
from lmkit.measure.statistics import spread
from lmkit.measure.tables import Column, Rows, markdown_table
from lmkit.measure.timing import SteadyStateClock, time_variants
from lmkit.registry import BENCHES, STRATEGIES

if TYPE_CHECKING:
    pass


class Options(RanksOptions):
    """`[bench.optimizer]`."""


def default_variants() -> tuple[str, ...]:
    """Return a strategy with whole state, every strategy that shards it (with bf16 weights, too), PyTorch's ZeRO."""
    sharded = [name for name in STRATEGIES.names if is_sharded(name)]
    halved = [f"{name} bf16" for name in sharded if "weights" in STRATEGIES.facts(name).uses]
    return ("bucketed", *sharded, *halved, "torch_ddp + ZeRO")


def check(recipe: Any) -> None:
    """Refuse unknown variants, those of one rank, and a model without a vocabulary before ranks start."""
    options = recipe.bench.table("optimizer")
    case_of(recipe, options, "optimizer")
    for name in options.variants:
        parse_name(name, recipe.parallel, "optimizer")
        if name in SOLO:
            raise UsageError(
                "bench.not_of_all_ranks",
                f"bench.optimizer.variants: {name!r} does not run on all ranks",
                hint='use "none": each of its ranks holds what one rank would',
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

    Each is built, measured and dropped before the next: no round of one pairs with a round of another (`bench ddp` is
    for that). Bytes are this rank's: `state_bytes` is what the optimizer holds (without masters), `state_share` that
    over the first variant whose state is whole; the rest is what the CUDA allocator has handed out (None on a CPU)
    after model and optimizer were made, before the optimizer's step, after it, and at most. Times are the slowest
    rank's, per round.
    """
    from lmkit.model.accounting import flops_per_token

    options, ranks = context.options, context.ranks
    case = case_of(context.recipe, options, "optimizer")
    limits = context.limits([options.precision]) if ranks.is_first else None
    claim_workspaces(ranks.device)
    names = options.variants or default_variants()
    rows: Rows = []
    for number, name in enumerate(names):
        context.progress("optimizer", number, len(names))
        begin_account(ranks)
        built, row = _measure_memory(name, case, context)
        samples = _time_alone(built, context)
        times = spread(samples)
        tokens_per_s = ranks.world_size * case.tokens_per_step / times.median * 1e3
        flops = flops_per_token(case.model, case.model.context_length)
        row |= {
            "precision": case.precision,
            "flops_per_token": flops,
            "step_ms": times.median,
            "p10_ms": times.p10,
            "p90_ms": times.p90,
            "tokens_per_s": tokens_per_s,
            "samples_ms": samples,
        }
        if limits is not None:
            rate = tokens_per_s / ranks.world_size * flops
            mfu = model_flops_utilization(rate, ranks.device, case.precision, limits)
            row |= {"mfu": mfu.share, "mfu_basis": mfu.basis}
        rows.append(row)
        context.keep([row])
        del built
    context.progress("optimizer", len(names), len(names))
    whole = next((row["state_bytes"] for row in rows if not is_sharded(row["variant"])), None)
    for row in rows:
        row["state_share"] = None if whole is None else row["state_bytes"] / whole
    return rows


def state_bytes(built: Loop) -> int:
    """Return the bytes of optimizer state on this rank, without fp32 masters of bf16 weights."""
    import torch

    optimizer: Any = built.optimizer
    # PyTorch's ZeroRedundancyOptimizer keeps the state of the parameters dealt to this rank in `optim`.
    states = optimizer.optim.state if hasattr(optimizer, "optim") else optimizer.state_dict()["state"]
    return sum(
        value.nbytes
        for state in states.values()
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and key != "master"
    )


def _measure_memory(name: str, case: Case, context: Context) -> tuple[Loop, dict[str, Any]]:
    import torch

    ranks = context.ranks
    on_gpu = ranks.device.type == "cuda"
    points: dict[str, int | None] = {}

    def note(point: str) -> None:
        if on_gpu:
            torch.cuda.synchronize(ranks.device)
        points[point] = torch.cuda.memory_allocated(ranks.device) if on_gpu else None

    note("start")
    built = Loop(name, case, ranks)
    note("init")
    for _ in range(3):  # state exists, and the order of buckets is settled
        built.step()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(ranks.device)
    built.training.run(before_update=lambda: note("before_step"))
    built.training.wait_for_weights()
    note("after_step")
    points["peak"] = torch.cuda.max_memory_allocated(ranks.device) if on_gpu else None
    start = points.pop("start")
    return built, {
        "case": case.name,
        "variant": name,
        "world_size": ranks.world_size,
        "parameters": sum(p.numel() for p in built.training.model.parameters()),
        "state_bytes": state_bytes(built),
    } | {
        f"{point}_bytes": None if value is None or start is None else value - start
        for point, value in points.items()
    }


def _time_alone(built: Loop, context: Context) -> list[float]:
    from lmkit.parallel.collectives import agree

    ranks, options = context.ranks, context.options
    with without_garbage_collection():
        timing = time_variants(
            {"step": built.step},
            device=ranks.device,
            repeats=options.rounds,
            warmup=0,
            prepare={"step": lambda: agree(ranks)},
            clock=SteadyStateClock(ranks.device, options.steps_per_sample),
        )["step"]
        return slowest_rank(timing.samples_ms, ranks)


# Rows in words

COLUMNS = (
    *(column for column in DDP_COLUMNS if column.key in ("variant", "step_ms", "spread", "tokens_per_s")),
    Column("mfu", "MFU", ".1%"),
    Column("state_mb", "state MB", ",.1f"),
    Column("state_share", "of plain", ".1%"),
    Column("init_mb", "init MB", ",.0f"),
    Column("before_mb", "before MB", ",.0f"),
    Column("after_mb", "after MB", ",.0f"),
)
POINTS_NOTE = (
    "init, before, after: what the CUDA allocator holds when all is built, before and after an optimizer step"
)


def summarize(rows: Rows) -> Summary:
    """Say what share of the state is left, and compare the peak with that of the whole state."""
    shown = [_with_megabytes(row) for row in rows]
    columns = filled(COLUMNS, shown)
    cases = grouped(shown, lambda row: str(row["case"]))
    bases = dict.fromkeys(row["mfu_basis"] for row in rows if row.get("mfu_basis"))
    return Summary(
        "Optimizer state sharding",
        columns,
        shown,
        about=f"{rows[0]['world_size']} ranks",
        findings=tuple(finding for members in cases.values() for finding in findings(members)),
        tables={case: markdown_table(members, columns) for case, members in cases.items()},
        notes=(
            "state: what the optimizer holds on this rank, MB (10^6 bytes)",
            *([POINTS_NOTE] if any(column.key == "init_mb" for column in columns) else []),
            SPREAD_NOTE,
            *(f"MFU: share of the {basis}" for basis in bases),
        ),
    )


def _with_megabytes(row: dict[str, Any]) -> dict[str, Any]:
    sizes = {
        "state_mb": row["state_bytes"],
        "init_mb": row.get("init_bytes"),
        "before_mb": row.get("before_step_bytes"),
        "after_mb": row.get("after_step_bytes"),
    }
    return with_units(row) | {key: size / 1e6 for key, size in sizes.items() if size is not None}


def findings(rows: Rows) -> list[str]:
    """Return the sentences that the rows of one case support."""
    found = []
    plain = next((row for row in rows if not is_sharded(row["variant"])), None)
    for row in rows:
        if not is_sharded(row["variant"]) or row["variant"].startswith("torch"):
            continue
        size = f"{row['variant']}: {row['state_bytes'] / 1e6:,.1f} MB of state on a rank"
        if row.get("state_share") is not None:
            least = 1 / row["world_size"]
            size += (
                f", {row['state_share']:.2%} of the whole (the least possible is {least:.2%} plus padding)"
            )
        found.append(size + ".")
        if plain and plain.get("peak_bytes") and row.get("peak_bytes"):
            found.append(
                f"{row['variant']}: a step peaks at {row['peak_bytes'] / 1e9:.2f} GB, "
                f"{row['peak_bytes'] / plain['peak_bytes'] - 1:+.1%} of {plain['variant']}'s "
                f"{plain['peak_bytes'] / 1e9:.2f} GB."
            )
    return found


def pictures(rows: Rows) -> dict[str, bytes]:
    """Draw the state of each rank."""
    picture = grouped_bars(
        [row["variant"] for row in rows],
        {"state per rank": [row["state_bytes"] / 1e6 for row in rows]},
        title=f"Optimizer state on each of {rows[0]['world_size']} ranks",
        x_label="variant",
        y_label="MB (10^6 bytes)",
        spec=",.1f",
    )
    return {"optimizer_state.png": picture}
