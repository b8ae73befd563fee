"""`lmkit bench optimizer`: whole against sharded optimizer state: memory at each point of a step, and speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lmkit.bench.ddp_clock import SteadyStateClock, of_slowest_rank, without_garbage_collection
from lmkit.bench.ddp_contenders import (
    SHARDED,
    SOLO,
    Contender,
    DdpCase,
    begin_account,
    contender,
    parse_name,
)
from lmkit.bench.journal import Journal
from lmkit.errors import UsageError
from lmkit.measure.memory import claim_workspaces
from lmkit.measure.progress import Progress
from lmkit.measure.statistics import spread
from lmkit.measure.timing import time_variants
from lmkit.model.accounting import flops_per_token
from lmkit.parallel.collectives import agree
from lmkit.parallel.protocol import ShardedState
from lmkit.parallel.ranks import Ranks

CONTENDERS = ("bucketed", "zero1", "zero1 bf16", "torch_ddp + ZeRO")


def optimizer_rows(
    case: DdpCase,
    ranks: Ranks,
    *,
    names: Sequence[str] = CONTENDERS,
    rounds: int = 10,
    steps_per_sample: int = 4,
    progress: Progress | None = None,
    journal: Journal | None = None,
) -> list[dict[str, Any]]:
    """One row per contender, each built, measured and dropped before the next: their times are of different minutes,
    and no round of one pairs with a round of another (`ddp_rows` is for that). Every rank calls this.

    Bytes are this rank's: `state_bytes` is what the optimizer holds (without masters), `state_share` that over
    what the first contender holds whose state is whole (None without one); the rest is what the CUDA allocator
    has handed out (None on a CPU) after model and optimizer were made, after the backward pass and
    synchronisation (before the step), after the step, and at most during these. Times are the slowest rank's,
    per round, in ms per step. The first rank keeps the rows in `journal`.

    Raises:
        UsageError: no contender of that name, or one that is not of all ranks.
        torch.OutOfMemoryError: one does not fit.
    """
    for name in names:
        parse_name(name, "optimizer")
    for name in SOLO:
        if name in names:
            raise UsageError(
                f"bench.optimizer.contenders: {name!r} is not of all ranks",
                hint='take "none", whose ranks each hold what one rank would',
            )
    claim_workspaces(ranks.device)
    rows: list[dict[str, Any]] = []
    for number, name in enumerate(names):
        if progress is not None and ranks.is_first:
            progress("optimizer", number, len(names))
        begin_account(ranks)
        built, row = _measure_memory(name, case, ranks)
        with without_garbage_collection():
            samples = _time_alone(built, ranks, rounds, steps_per_sample)
        summary = spread(samples)
        rows.append(
            row
            | {
                "precision": case.precision,
                "flops_per_token": flops_per_token(case.model, case.model.context_length),
                "step_ms": summary.median,
                "p10_ms": summary.p10,
                "p90_ms": summary.p90,
                "tokens_per_s": ranks.world_size * case.tokens_per_step / summary.median * 1e3,
                "samples_ms": samples,
            }
        )
        if journal is not None and ranks.is_first:
            journal.add(rows[-1:])
        del built
    if progress is not None and ranks.is_first:
        progress("optimizer", len(names), len(names))
    wholes = (
        row["state_bytes"] for name, row in zip(names, rows, strict=True) if not name.startswith(SHARDED)
    )
    whole = next(wholes, None)
    for row in rows:
        row["state_share"] = None if whole is None else row["state_bytes"] / whole
    return rows


def state_bytes(built: Contender) -> int:
    """Bytes of optimizer state on this rank, without fp32 masters of bf16 weights."""
    optimizer = built.optimizer
    if isinstance(optimizer, ShardedState):
        states = optimizer.state_dict()["state"]
    elif hasattr(optimizer, "optim"):
        # PyTorch's ZeroRedundancyOptimizer: of the parameters dealt to this rank.
        states = optimizer.optim.state
    else:
        states = optimizer.state
    return sum(
        value.nbytes
        for state in states.values()
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and key != "master"
    )


def _measure_memory(name: str, case: DdpCase, ranks: Ranks) -> tuple[Contender, dict[str, Any]]:
    start = _allocated(ranks.device)
    built = contender(name, case, ranks)
    after_init = _allocated(ranks.device)
    for _ in range(3):  # state exists, and the bucket order is settled
        built.step()
    if ranks.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(ranks.device)
    built.backward()
    built.sync.finish(wait=False)
    before_step = _allocated(ranks.device)
    built.optimizer.step()
    after_step = _allocated(ranks.device)
    built.optimizer.zero_grad(set_to_none=True)
    built.sync.wait_for_weights()
    peak = torch.cuda.max_memory_allocated(ranks.device) if ranks.device.type == "cuda" else None
    readings = {"init": after_init, "before_step": before_step, "after_step": after_step, "peak": peak}
    return built, {
        "case": case.name,
        "contender": name,
        "world_size": ranks.world_size,
        "parameters": sum(p.numel() for p in built.model.parameters()),
        "state_bytes": state_bytes(built),
    } | {
        f"{point}_bytes": None if value is None or start is None else value - start
        for point, value in readings.items()
    }


def _allocated(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


def _time_alone(built: Contender, ranks: Ranks, rounds: int, steps: int) -> list[float]:
    timing = time_variants(
        {"step": built.step},
        device=ranks.device,
        repeats=rounds,
        warmup=0,
        prepare={"step": lambda: agree(ranks)},
        clock=SteadyStateClock(ranks.device, steps),
    )["step"]
    return of_slowest_rank(timing.samples_ms, ranks)
