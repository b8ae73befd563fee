"""The variants of `lmkit bench ddp` and `lmkit bench optimizer`: names such as "zero1 bf16" -> training steps."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from lmkit.bench.trainings import Variant
from lmkit.errors import UsageError, did_you_mean
from lmkit.measure.memory import PeakMemory
from lmkit.recipe.recipe import Recipe, conflicts
from lmkit.recipe.tables import (
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PositiveFloat,
    PositiveInt,
    Table,
    TrainConfig,
)
from lmkit.recipe.values import StrategyVariant
from lmkit.registry import STRATEGIES

if TYPE_CHECKING:
    import torch

    from lmkit.bench.training_gate import Reference
    from lmkit.parallel.ranks import Ranks
    from lmkit.training.setup import TrainingStep

SOLO = ("one rank", "one rank bf16")
"""Variants whose ranks train alone, each on its own."""
TORCH_ZERO = "torch_ddp + ZeRO"
TORCH_BUCKET_MB = 25.0  # PyTorch's default
COMPILED = " compiled"
"""Ends the name of a variant whose blocks torch.compile compiles."""
_DDP = {"strategy": "torch_ddp", "bucket_mb": TORCH_BUCKET_MB}
NAMED: dict[str, dict[str, Any]] = {
    SOLO[0]: {"strategy": "none"},
    SOLO[1]: {"strategy": "zero1", "weights": "bf16"},
    "torch_ddp default": {**_DDP, "options": {"gradient_as_bucket_view": False}},
    "torch_ddp static": {**_DDP, "options": {"static_graph": True}},
    TORCH_ZERO: {**_DDP, "options": {}},
}
"""Variant whose name is not a strategy with options -> its keys of [parallel]."""
OPTION = re.compile(
    r"(?:(?P<reduce_dtype>bf16) wire|(?P<state_dtype>bf16) states|(?P<weights>bf16)|(?P<gather>collective)"
    r"|(?P<bucket_mb>\d*\.?\d+(?:e[+-]?\d+)?) MB)(?: |$)"
)
"""An option in a name; the group is its key of [parallel]."""


First = Callable[[str, "TrainingStep", PeakMemory], dict[str, Any]]
"""Returns what is measured of a training: of its name, itself, and the memory of making it."""


class RanksOptions(Table):
    """The keys that `bench ddp` and `bench optimizer` share; the rest of the step is the recipe's."""

    rows: PositiveInt = 4
    """Sequences per rank and step, in one micro-batch."""
    precision: Literal["fp32", "bf16", "bf16-autocast"] = "fp32"
    """Precision of the matrix products."""
    variants: tuple[StrategyVariant, ...] = ()
    """Strategies, with options ("bucketed 100 MB", "zero1 bf16", "torch_fsdp compiled"), and rivals; empty: all."""
    rounds: PositiveInt = 10
    """Interleaved samples of each variant; fewer than 6 give no interval."""
    steps_per_sample: PositiveInt = 4
    """Timed training steps of a sample; half as many untimed steps precede them."""
    max_seconds: PositiveFloat = 600.0
    """Seconds of timing for variants that take turns; whole rounds only."""


def case_of(recipe: Any, options: RanksOptions, bench: str) -> Recipe:
    """Return the recipe whose step is measured: with a vocabulary, and the rows of one rank as its batch."""
    from lmkit.tokenizer.vocabulary import required_model

    model = required_model(recipe, command=f"bench {bench}")
    train = (recipe.train or TrainConfig()).changed(
        batch_size=options.rows,
        accumulation=1,
        precision=options.precision,
        cuda_graph="off",  # only some variants could be captured
    )
    return recipe.changed(model=model, train=train)


def tables_of(case: Recipe) -> tuple[ModelConfig, TrainConfig]:
    assert case.model is not None
    assert case.train is not None
    return case.model, case.train


def is_sharded(name: str) -> bool:
    """Return whether the ranks of a variant hold a share of the optimizer state each."""
    strategy = name.partition(" ")[0]
    known = name not in SOLO and strategy in STRATEGIES.names
    return name == TORCH_ZERO or (known and "optimizer" in STRATEGIES.facts(strategy).shards)


def is_own(name: str) -> bool:
    """Return whether a variant is a strategy of lmkit that synchronizes."""
    strategy = name.partition(" ")[0]
    known = name not in (*SOLO, "none") and strategy in STRATEGIES.names
    return known and not STRATEGIES.facts(strategy).rival


def synchronizes(name: str) -> bool:
    """Return whether the ranks of a variant train one model together."""
    return name not in (*SOLO, "none")


def baseline_of(name: str) -> str:
    """Return the variant of one rank with the same weights."""
    return SOLO[1] if is_rounded(name.replace("bf16 wire", "")) else SOLO[0]


def is_rounded(name: str) -> bool:
    """Return whether an option of a variant rounds to 16 bits; the name of the strategy itself says nothing."""
    return "bf16" in name.split()[1:]


def parallel_of(name: str, parallel: ParallelConfig, bench: str = "ddp") -> ParallelConfig:
    """Return the [parallel] table of a variant.

    Names: "one rank", "one rank bf16", a strategy, a strategy with options ("bucketed 100 MB", "bucketed bf16 wire",
    "zero1 bf16", "zero1 bf16 collective", "fsdp bf16 states"), or a rival of PyTorch's: "torch_ddp" (gradients as
    views of buckets of 25 MiB), "torch_ddp default", "torch_ddp static", "torch_ddp + ZeRO"; each may be `COMPILED`.

    A variant inherits `bucket_mb` of the recipe's table; its name sets all other options that names have.
    """
    said = ParallelConfig.model_fields.keys() & {"strategy", "options", *OPTION.groupindex} - {"bucket_mb"}
    plain = parallel.changed(**{key: getattr(ParallelConfig(), key) for key in said})
    name = name.removesuffix(COMPILED)
    if name in NAMED:
        return plain.changed(**NAMED[name])
    strategy, _, detail = name.partition(" ")
    options = _named_options(detail)
    facts = STRATEGIES.facts(strategy) if strategy in STRATEGIES.names else None
    if facts is None or options is None or not options.keys() <= {*facts.uses, *facts.options}:
        known = (*NAMED, *STRATEGIES.names)
        raise UsageError(
            "bench.unknown_variant",
            f"bench.{bench}.variants: there is no {name!r}{did_you_mean(name, known)}",
            hint=f"{'; '.join(known)}; or with options that the strategy uses: bucketed 100 MB; zero1 bf16; "
            "flat bf16 wire; fsdp bf16 states; any of them compiled; or those of --plugin FILE",
        )
    size = {"bucket_mb": TORCH_BUCKET_MB} if strategy == "torch_ddp" else {}
    own = {"options": {key: options.pop(key) for key in facts.options if key in options}}
    return plain.changed(**{"strategy": strategy, **size, **options, **own})


def _named_options(detail: str) -> dict[str, Any] | None:
    """Return the keys of [parallel] that a name such as "100 MB bf16 wire" sets; None if it is malformed."""
    named: dict[str, Any] = {}
    while detail:
        found = OPTION.match(detail)
        if found is None or found.lastgroup is None or found.lastgroup in named:
            return None
        named[found.lastgroup] = found[found.lastgroup]
        detail = detail[found.end() :]
    if "bucket_mb" in named:
        named["bucket_mb"] = float(named["bucket_mb"])
        return named if 0 < named["bucket_mb"] < math.inf else None
    return named


def expected_link_bytes(
    name: str, parameter_bytes: int, world_size: int, parallel: ParallelConfig, precision: str = "fp32"
) -> float:
    """Return the bytes that a rank must send per step, without flags and padding.

    An all-reduce of the gradients, or a reduce-scatter of gradients and an all-gather of weights, costs 2 (W-1)/W of
    their bytes. Gradients of fp32 weights that are reduced as bf16 count half. Sharded weights are gathered a second
    time (the formula counts the last layer's, too). PyTorch's ZeRO-1 then broadcasts the weights: another (W-1)/W.
    """
    if name == "none":
        return 0.0
    options = parallel_of(name, parallel)
    are_wide = options.weights == "fp32" and precision != "bf16"
    gradients = 0.5 if options.reduce_dtype == "bf16" and are_wide else 1.0
    second_half = 1.0 if is_sharded(name) and name != TORCH_ZERO else gradients
    third = 1.0 if name == TORCH_ZERO or "parameters" in STRATEGIES.facts(options.strategy).shards else 0.0
    return (gradients + second_half + third) * (world_size - 1) / world_size * parameter_bytes


def unfit(name: str, case: Recipe) -> str:
    """Return why a variant cannot make the recipe's update, or ""."""
    if name == TORCH_ZERO and case.optimizer.name != "adamw":
        return "updates with PyTorch's AdamW, which is not the recipe's [optimizer]"
    train = TrainConfig().changed(precision=tables_of(case)[1].precision)
    tables = {"optimizer": case.optimizer, "parallel": parallel_of(name, case.parallel), "train": train}
    return "; ".join(conflicts(tables, resolved=True))


def reference_of(names: Sequence[str], case: Recipe, ranks: Ranks) -> Reference:
    """Return the steps of one process on the batch of all ranks, if a variant needs them. Collective."""
    from lmkit.bench.training_gate import reference

    if not any(synchronizes(name) and not unfit(name, case) for name in names):
        return ""
    return reference(_on_all_ranks(case, ranks), ranks, accumulates=True)


def variant_of(
    name: str, row: dict[str, Any], case: Recipe, ranks: Ranks, seen: Reference, more: First
) -> Variant:
    """Return a variant; it is checked against `seen`, of `reference_of`, if its ranks synchronize."""
    from lmkit.bench.training_gate import ROUNDED, STEPS, after_timing, budget_of, judge

    budget = ROUNDED if is_rounded(name) else budget_of(tables_of(case)[1].precision)

    def first_steps(training: TrainingStep) -> dict[str, Any]:
        if synchronizes(name):
            return judge(training, seen, budget, accumulates=True)[0]
        for _ in range(STEPS):
            training.run()
        return {"status": "ok"}

    return Variant(
        row=row,
        make=partial(make_training, name, case, ranks),
        judge=first_steps,
        more=partial(more, name),
        check=lambda training: after_timing(training, budget),
    )


def _on_all_ranks(case: Recipe, ranks: Ranks) -> Recipe:
    return case.changed(train={"batch_size": tables_of(case)[1].batch_size * ranks.world_size})


def make_training(name: str, case: Recipe, ranks: Ranks) -> TrainingStep:
    """Make the training loop of a variant: the step that `lmkit train` runs, on random tokens."""
    from lmkit.parallel.ranks import Ranks as Place
    from lmkit.training.setup import TrainingStep

    ranks = Place(device=ranks.device) if name in SOLO else ranks
    recipe = _on_all_ranks(case, ranks)
    if name.endswith(COMPILED):
        recipe = recipe.changed(model={"compile": "block"})
    if (tables_of(case)[1].precision, name) == ("bf16", TORCH_ZERO):  # it keeps no masters of bf16 weights
        recipe = recipe.changed(train={"precision": "bf16-autocast"})
    parallel = parallel_of(name, recipe.parallel)
    make_optimizer = partial(_torch_zero, recipe.optimizer) if name == TORCH_ZERO else None
    training = TrainingStep(recipe, ranks, parallel=parallel, make_optimizer=make_optimizer)
    if name == TORCH_ZERO:
        training.optimizer.register_step_post_hook(partial(_count_broadcasts, training.step.sync.traffic))
    return training


def _torch_zero(table: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Make PyTorch's ZeRO-1 of AdamW: each rank updates some whole parameters and broadcasts them after the step."""
    import torch

    # Its package compiles deprecated TorchScript when it is imported, with a warning.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    options: dict[str, Any] = {"fused": True, "lr": table.lr, "betas": table.betas, "eps": table.eps}
    return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, parameters_as_bucket_view=True, **options)


def _count_broadcasts(traffic: Any, optimizer: Any, *_: Any) -> None:
    """Count the bytes of PyTorch's ZeRO-1: each rank broadcasts its parameters as one tensor."""
    for of_device in optimizer._buckets:
        for of_rank in of_device:
            traffic.count(of_rank.nbytes, optimizer.world_size)
