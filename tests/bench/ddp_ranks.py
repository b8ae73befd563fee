"""What the ranks run in test_ddp.py: the data-parallel benches, tiny, in one process group."""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from lmkit.bench import ddp
from lmkit.bench.all_reduce import all_reduce
from lmkit.bench.harness import Context, slowest_rank
from lmkit.bench.optimizer import optimizer
from lmkit.parallel.ranks import Ranks, process_group
from lmkit.recipe.load import validate

MODEL = {"vocab_size": 64, "context_length": 16, "d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 2}
NAMES = (
    *("one rank", "none", "naive", "flat", "overlap", "bucketed", "torch_ddp", "zero1"),
    *("one rank, bf16 weights", "zero1 bf16", "torch_ddp + ZeRO", "bucketed bf16 wire", "bucketed 0.05 MB"),
)


class Kept:
    """A journal that remembers all that stood in it, or was added."""

    def __init__(self) -> None:
        self.contents: list[list[dict[str, Any]]] = []

    def add(self, rows: list[dict[str, Any]]) -> None:
        self.contents.append(json.loads(json.dumps(rows)))

    replace = add


def context_of(bench: str, ranks: Ranks, reports: list[Any], **keys: Any) -> Context:
    tables = {"run": {"name": "tiny"}, "model": MODEL, "bench": {bench: keys}}
    recipe = validate(json.loads(json.dumps(tables)), origin="test")
    journal: Any = Kept()
    return Context(recipe, recipe.bench.table(bench), ranks, lambda *report: reports.append(report), journal)


def case_of(context: Context) -> ddp.Case:
    return ddp.case_of(context.recipe, context.options, "ddp")


def with_rank_1_full(ranks: Ranks) -> list[dict[str, Any]]:
    """Rank 1 alone has no room for a variant (without a collective that the other would be left in)."""

    class Full(ddp.Loop):
        def __init__(self, name: str, case: ddp.Case, ranks: Ranks) -> None:
            if name == "none" and ranks.rank == 1:
                raise torch.OutOfMemoryError("no room")
            super().__init__(name, case, ranks)

    context = context_of("ddp", ranks, [], rows=2, rounds=1, steps_per_sample=1)
    with mock.patch.object(ddp, "Loop", Full):
        return ddp.measure(case_of(context), ("none", "naive"), context, part="ladder")


def broadcast_by_zero(case: ddp.Case, ranks: Ranks) -> dict[str, float]:
    """What PyTorch's ZeRO-1 hands to broadcasts in a step of its optimizer, and what is counted for it."""
    built = ddp.Loop("torch_ddp + ZeRO", case, ranks)
    built.training.backward()
    traffic = built.sync.traffic
    traffic.reset()
    with mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as broadcast:
        built.optimizer.step()
    return {
        "sent": sum(call.kwargs["tensor"].nbytes for call in broadcast.call_args_list),
        "calls": traffic.calls,
        "payload_bytes": traffic.payload_bytes,
        "link_bytes": traffic.link_bytes,
        "parameter_bytes": sum(parameter.nbytes for parameter in built.training.model.parameters()),
    }


def measure_all() -> dict[str, Any]:
    torch.set_num_threads(1)
    with process_group("cpu", timeout_s=240) as ranks:
        reports: list[tuple[str, int, int]] = []
        ladder = context_of("ddp", ranks, reports, rows=2, precision="bf16", rounds=6, steps_per_sample=1)
        case = case_of(ladder)
        # Rank 1 has all the time in the world; rank 0's is up after the first round.
        seconds = 1e-9 if ranks.is_first else 1e9
        short = context_of("ddp", ranks, [], rows=2, rounds=6, steps_per_sample=1, max_seconds=seconds)
        collectives = context_of("all_reduce", ranks, reports, sizes_mb=[0.01, 0.1], repeats=2)
        sharding = context_of(
            "optimizer",
            ranks,
            reports,
            variants=["zero1", "torch_ddp + ZeRO", "bucketed", "zero1 bf16"],
            rounds=2,
            steps_per_sample=1,
        )
        bucketed = ddp.Loop("bucketed", case, ranks)
        assert ddp._communication_alone("bucketed", bucketed, ranks) is not None
        left = sum(parameter.grad is not None for parameter in bucketed.training.model.parameters())
        measured = {
            "ladder": ddp.measure(case, NAMES, ladder, part="ladder"),
            "short": ddp.measure(case_of(short), ("naive", "flat"), short, part="ladder"),
            "full": with_rank_1_full(ranks),
            "gradients_left": left,
            "broadcast": broadcast_by_zero(case, ranks),
            "slowest": slowest_rank([1.0 + ranks.rank, 3.0 - ranks.rank], ranks),
            "all_reduce": all_reduce(collectives),
            "optimizer": optimizer(sharding),
            "reports": reports,
        }
        journals = {"kept": ladder, "all_reduce_kept": collectives, "optimizer_kept": sharding}
        return measured | {name: context.journal.contents for name, context in journals.items()}  # type: ignore[attr-defined]
