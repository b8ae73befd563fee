"""What the ranks run in test_ddp.py: the three data-parallel benches, tiny, in one process group."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from lmkit.bench import ddp
from lmkit.bench.adamw_update import update_rows
from lmkit.bench.all_reduce import all_reduce_rows
from lmkit.bench.ddp_clock import of_slowest_rank
from lmkit.bench.ddp_contenders import Contender, DdpCase, contender
from lmkit.bench.optimizer import optimizer_rows
from lmkit.parallel.ranks import Ranks, process_group
from lmkit.recipe.tables import ModelConfig

CASE = DdpCase(
    "tiny",
    ModelConfig(vocab_size=64, context_length=16, d_model=64, d_ff=128, num_layers=2, num_heads=2),
    rows=2,
)
NAMES = (
    *ddp.LADDER,
    "one rank, bf16 weights",
    "zero1 bf16",
    "torch_ddp + ZeRO",
    "bucketed bf16 wire",
    "bucketed 0.05 MB",
)


def with_rank_1_full(ranks: Ranks) -> list[dict[str, Any]]:
    """Rank 1 alone has no room for a contender (one without a collective that the other would be left in)."""

    def build(name: str, case: DdpCase, ranks: Ranks) -> Contender:
        if name == "none" and ranks.rank == 1:
            raise torch.OutOfMemoryError("no room")
        return contender(name, case, ranks)

    with mock.patch.object(ddp, "contender", build):
        return ddp.ddp_rows(CASE, ("none", "naive"), ranks, rounds=1, steps_per_sample=1)


def gradients_after_communication_alone(ranks: Ranks) -> int:
    """What is left of them: the next pass would add to it, and keep a hook on every parameter."""
    built = contender("bucketed", CASE, ranks)
    assert ddp._communication_alone("bucketed", built, ranks) is not None
    return sum(parameter.grad is not None for parameter in built.model.parameters())


def broadcast_by_zero(ranks: Ranks) -> dict[str, float]:
    """What PyTorch's ZeRO-1 hands to broadcasts in a step of its optimizer, beside what is counted for it."""
    built = contender("torch_ddp + ZeRO", CASE, ranks)
    built.backward()
    traffic = built.sync.traffic
    traffic.reset()
    with mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as broadcast:
        built.optimizer.step()
    return {
        "sent": sum(call.kwargs["tensor"].nbytes for call in broadcast.call_args_list),
        "calls": traffic.calls,
        "payload_bytes": traffic.payload_bytes,
        "link_bytes": traffic.link_bytes,
        "parameter_bytes": sum(parameter.nbytes for parameter in built.model.parameters()),
    }


class Kept:
    """A journal that remembers all that stood in it, or was added."""

    def __init__(self, contents: list[list[dict[str, Any]]]) -> None:
        self.add = self.replace = contents.append


def measure_all() -> dict[str, list[dict[str, Any]]]:
    torch.set_num_threads(1)
    with process_group("cpu", timeout_s=240) as ranks:
        reports: list[tuple[str, int, int]] = []

        def progress(*report: Any) -> None:
            reports.append(report)

        kept: list[list[dict[str, Any]]] = []
        added: dict[str, list[list[dict[str, Any]]]] = {"all_reduce": [], "optimizer": []}
        ladder = ddp.ddp_rows(
            CASE, NAMES, ranks, rounds=6, steps_per_sample=1, progress=progress, journal=Kept(kept)
        )
        return {
            "ladder": ladder,
            "kept": kept,
            "short": ddp.ddp_rows(
                CASE,
                ("naive", "flat"),
                ranks,
                rounds=6,
                steps_per_sample=1,
                warmup=1,
                max_seconds=0.0 if ranks.is_first else math.inf,
            ),
            "full": with_rank_1_full(ranks),
            "left": [{"gradients": gradients_after_communication_alone(ranks)}],
            "broadcast": [broadcast_by_zero(ranks)],
            "slowest": [{"samples_ms": of_slowest_rank([1.0 + ranks.rank, 3.0 - ranks.rank], ranks)}],
            "compared": [ddp.compare(ladder, "naive", "naive")],
            "all_reduce": all_reduce_rows(
                ranks, sizes_mb=(0.01, 0.1), repeats=2, journal=Kept(added["all_reduce"])
            ),
            "optimizer": optimizer_rows(
                CASE,
                ranks,
                names=("zero1", "torch_ddp + ZeRO", "bucketed", "zero1 bf16"),
                rounds=2,
                steps_per_sample=1,
                progress=progress,
                journal=Kept(added["optimizer"]),
            ),
            "added": added,
            "update": update_rows(CASE.model, ranks, rounds=6, progress=progress),
            "progress": [{"stage": stage, "done": done, "total": total} for stage, done, total in reports],
        }
