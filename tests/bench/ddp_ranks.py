"""What the ranks run in test_ddp.py: the data-parallel benches, tiny, in one process group."""

import gc
import json
from collections.abc import Sequence
from typing import Any
from unittest import mock
from unittest.mock import ANY

import planted_kernels
import torch
from planted_strategies import NAMES as PLANTED
from planted_strategies import register

from lmkit.bench import context as bench_context
from lmkit.bench import ddp, ddp_variants, training_gate
from lmkit.bench.all_reduce import all_reduce
from lmkit.bench.context import Context
from lmkit.bench.ddp_variants import TORCH_ZERO, case_of, make_training
from lmkit.bench.optimizer import optimizer
from lmkit.measure.limits import Limits
from lmkit.parallel.collectives import largest_of_ranks
from lmkit.parallel.ranks import Ranks, process_group
from lmkit.recipe.load import validate
from lmkit.recipe.recipe import Recipe
from lmkit.recipe.tables import OptimizerConfig

MODEL = {"vocab_size": 64, "context_length": 16, "d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 2}
NAMES = (
    *("one rank", "none", "naive", "flat", "overlap", "bucketed", "torch_ddp", "zero1"),
    *("one rank bf16", "zero1 bf16", TORCH_ZERO, "bucketed bf16 wire", "bucketed 0.05 MB"),
)
MUON = ("bucketed", "torch_ddp", "torch_fsdp", TORCH_ZERO)


class Kept:
    """A journal that remembers all that stood in it, or was added."""

    def __init__(self) -> None:
        self.contents: list[list[dict[str, Any]]] = []

    def add(self, rows: list[dict[str, Any]]) -> None:
        self.contents.append(json.loads(json.dumps(rows)))

    def rows(self) -> list[dict[str, Any]]:
        """Of ranks that have not started again."""
        return []


def context_of(bench: str, ranks: Ranks, **keys: Any) -> Context:
    tables = {"run": {"name": "tiny"}, "model": MODEL, "bench": {bench: {"steps_per_sample": 1, **keys}}}
    if bench == "all_reduce":
        del tables["bench"][bench]["steps_per_sample"]
    recipe = validate(json.loads(json.dumps(tables)), origin="test")
    journal: Any = Kept()
    return Context(recipe, recipe.bench_table(bench), ranks, lambda *_: None, journal)


def with_rank_1_full(
    case: Recipe, ranks: Ranks, names: Sequence[str], owner: Any, what: str, first: Any = ANY
) -> list[dict[str, Any]]:
    """Rank 1 alone has no room in `owner.what(first, ...)` (without a collective that the other would be left in)."""
    real = getattr(owner, what)

    def full(*arguments: Any) -> Any:
        if arguments[0] == first and ranks.rank == 1:
            raise torch.OutOfMemoryError("no room")
        return real(*arguments)

    with mock.patch.object(owner, what, full):
        return ddp.measure(case, names, context_of("ddp", ranks, rounds=1), part="ladder")


def with_muon(ranks: Ranks) -> dict[str, Any]:
    """Rows of both benches for an optimizer that not every variant can take."""
    contexts = {name: context_of(name, ranks, rounds=1, variants=MUON) for name in ("ddp", "optimizer")}
    for context in contexts.values():
        context.recipe = context.recipe.changed(optimizer=OptimizerConfig(name="muon"))
    case = case_of(contexts["ddp"].recipe, contexts["ddp"].options, "ddp")
    names = {name: type(make_training(name, case, ranks).optimizer).__name__ for name in MUON[:2]}
    ladder = ddp.measure(case, MUON, contexts["ddp"], part="ladder")
    return {"ddp": ladder, "optimizer": optimizer(contexts["optimizer"]), "names": names}


def with_planted(ranks: Ranks) -> dict[str, Any]:
    """Rows of both benches for strategies that are wrong, and one that is right."""
    register()
    names = ("one rank", *PLANTED)
    short = context_of("ddp", ranks, rounds=1)
    case = case_of(short.recipe, short.options, "ddp")
    of_optimizer = context_of("optimizer", ranks, rounds=4, variants=names[1:])
    return {
        "ddp": ddp.measure(case, names, short, part="ladder"),
        "optimizer": optimizer(of_optimizer),
        "rounded": ddp.measure(
            case.changed(train={"precision": "bf16-autocast"}), names, short, part="ladder"
        ),
    }


def with_late_kernel(ranks: Ranks) -> list[dict[str, Any]]:
    """Rows of both benches for a kernel that is wrong from its 60th call on, each variant by itself."""
    rows: list[dict[str, Any]] = []
    planted_kernels.register()
    for name in ("one rank", "fsdp", "zero1"):
        bench = "optimizer" if name == "zero1" else "ddp"
        context = context_of(bench, ranks, rounds=20, variants=[name])
        context.recipe = context.recipe.changed(model={"attention": "halves_later"})
        case = case_of(context.recipe, context.options, bench)
        planted_kernels.CALLS.clear()
        rows += (
            optimizer(context) if bench == "optimizer" else ddp.measure(case, (name,), context, part="ladder")
        )
    return rows


def measure_all() -> dict[str, Any]:
    torch.set_num_threads(1)
    gc.freeze()  # benches collect garbage between variants: not the modules each time
    limits = Limits("a test", {"fp32": 1e12, "bf16": 1e12}, 1e10)
    bench_context.measure_limits = lambda *_: limits  # this process is ours
    with process_group("cpu", timeout_s=240) as ranks:
        ladder = context_of("ddp", ranks, rows=2, precision="bf16-autocast", rounds=3)
        case = case_of(ladder.recipe, ladder.options, "ddp")
        # Rank 1 has all the time in the world; rank 0's is up after the first round.
        short = context_of("ddp", ranks, rounds=6, max_seconds=1e-9 if ranks.is_first else 1e9)
        collectives = context_of("all_reduce", ranks, sizes_mb=[0.01, 0.1], repeats=2)
        names = ["zero1", TORCH_ZERO, "bucketed", "zero1 bf16"]
        sharding = context_of("optimizer", ranks, variants=names, rounds=2)
        bucketed = make_training("bucketed", case, ranks)
        assert ddp._communication_alone("bucketed", bucketed, ranks) is not None
        measured = {
            "ladder": ddp.measure(case, NAMES, ladder, part="ladder"),
            "short": ddp.measure(case, ("naive", "flat"), short, part="ladder"),
            "full": with_rank_1_full(case, ranks, ("none", "naive"), ddp_variants, "make_training", "none"),
            "gradients_left": sum(parameter.grad is not None for parameter in bucketed.model.parameters()),
            "muon": with_muon(ranks),
            "planted": with_planted(ranks),
            "late": with_late_kernel(ranks),
            "without room": with_rank_1_full(case, ranks, ("naive",), training_gate, "_RowByRow"),
            "slowest": largest_of_ranks([1.0 + ranks.rank, 3.0 - ranks.rank], ranks),
            "all_reduce": all_reduce(collectives),
            "optimizer": optimizer(sharding),
        }
        journals = {"all_reduce_kept": collectives, "optimizer_kept": sharding}
        return measured | {name: context.journal.contents for name, context in journals.items()}  # type: ignore[attr-defined]
