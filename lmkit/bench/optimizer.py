"""`lmkit bench optimizer`: memory and speed of a step with whole and with sharded optimizer state.

It times the step that `lmkit train` runs, after a check of its first steps (`training_gate`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lmkit.bench import ddp_variants
from lmkit.bench.context import Context
from lmkit.bench.ddp import measure
from lmkit.bench.ddp_variants import RanksOptions
from lmkit.bench.trainings import SPREAD
from lmkit.errors import UsageError
from lmkit.measure.memory import PeakMemory, claim_workspaces, track_peak
from lmkit.measure.tables import Column, Rows
from lmkit.registry import BENCHES, STRATEGIES

if TYPE_CHECKING:
    from lmkit.training.setup import TrainingStep


class Options(RanksOptions):
    """`[bench.optimizer]`."""


def default_variants() -> tuple[str, ...]:
    """Return a strategy with whole state, every strategy that shards it (with bf16 weights, too), PyTorch's ZeRO."""
    sharded = [name for name in STRATEGIES.names if ddp_variants.is_sharded(name)]
    halved = [f"{name} bf16" for name in sharded if "weights" in STRATEGIES.facts(name).uses]
    return ("bucketed", *sharded, *halved, ddp_variants.TORCH_ZERO)


def check(recipe: Any) -> None:
    """Refuse unknown variants, those of one rank, and a model without a vocabulary before ranks start."""
    options = recipe.bench_table("optimizer")
    ddp_variants.case_of(recipe, options, "optimizer")
    for name in options.variants:
        ddp_variants.parallel_of(name, recipe.parallel, "optimizer")
        if name in ddp_variants.SOLO:
            message = f"bench.optimizer.variants: {name!r} trains on one rank"
            hint = 'use "none": its ranks agree on every step, and each holds what one rank would'
            raise UsageError("bench.not_of_all_ranks", message, hint=hint)


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
    """Return one row per variant; each is dropped before the next, so that their rounds do not pair.

    Bytes are this rank's. `state_bytes` is the optimizer's state without masters; `state_share` divides it by that of
    the first variant with whole state. The other bytes are allocated by CUDA (None on a CPU).
    """
    options = context.options
    case = ddp_variants.case_of(context.recipe, options, "optimizer")
    names = options.variants or default_variants()
    claim_workspaces(context.device)
    seen = ddp_variants.reference_of(names, case, context.ranks)
    known = {row["variant"]: row for row in context.journal.rows()}  # where the ranks have started again
    rows: Rows = []
    for name in context.each("optimizer", names):
        if name in known:
            rows.append(known[name])
            continue
        (row,) = measure(case, (name,), context, part="", seen=seen, more=_memory_fields)
        del row["part"]
        state = row.get("state_bytes") if row["status"] == "ok" else None
        rows.append(row | {"precision": options.precision, "state_bytes": state})
        context.keep(rows[-1:])
    whole = next((row["state_bytes"] for row in rows if not ddp_variants.is_sharded(row["variant"])), None)
    for row in rows:
        row["state_share"] = row["state_bytes"] / whole if whole and row["state_bytes"] is not None else None
    return rows


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
    optimizer: Any = built.optimizer
    # PyTorch's ZeroRedundancyOptimizer keeps the state of the parameters dealt to this rank in `optim`.
    states = optimizer.optim.state if hasattr(optimizer, "optim") else optimizer.state_dict()["state"]
    state_bytes = sum(
        value.nbytes
        for state in states.values()
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and key != "master"  # fp32 copies of bf16 weights
    )
    return {"parameters": parameters, "state_bytes": state_bytes, **points}


TITLE = "Optimizer state sharding"
ABOUT = ("case", "world_size", "precision")
COLUMNS = (
    Column("variant", "variant"),
    Column("step_ms", "ms/step", ".2f", instead="status"),
    SPREAD,
    Column("tokens_per_s", "tokens/s", ",.0f"),
    Column("mfu", "MFU", ".1%"),
    Column("state_bytes", "state MB", ",.1f", scale=1e6, axis="MB (10^6 bytes)", better="lower"),
    Column("state_share", "of whole", ".1%"),
    Column("init_bytes", "init MB", ",.0f", scale=1e6),
    Column("before_step_bytes", "before MB", ",.0f", scale=1e6),
    Column("after_step_bytes", "after MB", ",.0f", scale=1e6),
    Column("peak_bytes", "peak MB", ",.0f", scale=1e6, wide=True),
)
NOTES = (
    "state: what the optimizer holds on this rank, MB (10^6 bytes); init, before, after (GPUs): what the allocator "
    "holds when all is built, before and after an optimizer step",
)
