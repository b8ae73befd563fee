"""Plan a training from its recipe alone: a rank's memory, and what fits on a GPU.

`plan` allocates nothing; `check` makes a few steps on this machine, on random tokens, to compare them with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from lmkit.data.token_files import check_divisible
from lmkit.errors import LmkitError, UsageError, limit_reached
from lmkit.measure.environment import Card, card_here, known_peak
from lmkit.measure.memory import claim_workspaces, memory_in_use, track_peak
from lmkit.model.accounting import count_parameters
from lmkit.model.memory import Form, Held, StepMemory, step_memory
from lmkit.parallel.collectives import largest_of_ranks
from lmkit.parallel.ranks import Ranks
from lmkit.recipe.load import required
from lmkit.recipe.recipe import Recipe
from lmkit.recipe.tables import ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig
from lmkit.registry import OPERATIONS, OPTIMIZERS, STRATEGIES
from lmkit.tokenizer.vocabulary import required_model
from lmkit.training.precision import with_precision
from lmkit.training.process import numerics, ranks_of
from lmkit.training.setup import TrainingStep
from lmkit.training.step import MEASURED, WARM_UPS

KEPT_BACK = {"alone": 1_000_000_000, "with others": 2_300_000_000}
KEPT_BACK_SHARE = 0.02
"""Bytes of a rank, and the share of a card, for the CUDA context, libraries and the gaps between tensors. On an H200
the allocator did not see 0.89 GB alone, 2.19 GB under `fsdp` with NCCL; workspaces of matrix products took 0.13."""
LONGEST = 1 << 24
_WIDTHS = {"fp32": (4, 4), "bf16": (2, 2), "fp8": (2, 2), "bf16-autocast": (4, 2), "fp16": (4, 2)}
"""precision -> bytes of an element of weights and the residual stream, and of what matrix products read."""

FEW = 10
SHORT_S = 1.0
"""So many steps shorter than this are timed together: one alone would show what the host does before it."""
SAMPLED_S = 2.0
"""How long such samples are taken. The median counts, because a host is sometimes slower for a second."""


@dataclass(frozen=True)
class Plan:
    """What a step of a recipe needs on one rank, and what fits on a card.

    Attributes:
        rows: sequences of a micro-batch on one rank, of `context` tokens.
        memory: bytes by kind.
        usable: bytes of the card that tensors may take.
        most_rows: with this context; most_context: with these rows, a multiple of 64. 0: not even one fits.
        kv_cache: bytes for the `texts` that [generate] writes at once, as long as the context, beside the weights,
            which then take `generating`.
    """

    card: Card
    config: ModelConfig
    train: TrainConfig
    strategy: str
    ranks: int
    rows: int
    parameters: int
    fused: bool
    memory: StepMemory
    usable: int
    most_rows: int
    most_context: int
    texts: int
    kv_cache: int
    generating: int

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.usable


def plan(recipe: Recipe, card: Card, *, ranks: int = 1) -> Plan:
    """Count what the recipe needs on each of `ranks` cards."""
    config = required_model(recipe, command="plan")
    recipe = with_precision(recipe, has_bf16=known_peak(card.name, "bf16") is not None)
    train = required(recipe.train, "train", recipe, command="plan")
    parallel = recipe.parallel if ranks > 1 else ParallelConfig(strategy="none")
    check_divisible(train.batch_size, ranks, train.accumulation)
    rows = train.batch_size // (ranks * train.accumulation)
    precision = train.precision
    if precision == "fp32" and parallel.weights == "bf16":
        precision = "bf16"
    form = form_of(config, precision)
    held = held_by(config, train, parallel, recipe.optimizer, ranks)

    def memory(config: ModelConfig, rows: int) -> StepMemory:
        tokens = rows * config.context_length
        return step_memory(config, form, held, tokens=tokens, accumulation=train.accumulation)

    def longer(context: int) -> ModelConfig:
        return config.changed(context_length=context)

    usable = int(card.memory * (1 - KEPT_BACK_SHARE)) - KEPT_BACK["alone" if ranks == 1 else "with others"]
    counted, writes = count_parameters(config), recipe.generate
    element = 4 if writes.precision == "fp32" else 2
    of_token = 2 * config.num_layers * config.kv_heads * config.head_dim * element
    return Plan(
        card=card,
        config=config,
        train=train,
        strategy=parallel.strategy,
        ranks=ranks,
        rows=rows,
        parameters=counted.total,
        fused=form.blocks_reuse_memory,
        memory=memory(config, rows),
        usable=usable,
        most_rows=_most(lambda rows: memory(config, rows).peak <= usable),
        most_context=64 * _most(lambda units: memory(longer(64 * units), rows).peak <= usable, LONGEST // 64),
        texts=writes.batch_size,
        kv_cache=writes.batch_size * config.context_length * of_token,
        generating=counted.total * element + (counted.multiplying if writes.weights == "fp8" else 0),
    )


def form_of(config: ModelConfig, precision: str, device: str = "cuda") -> Form:
    """Return how a model computes."""
    operations = config.operations
    # Blocks are compiled from PyTorch's operations, and fused operations run around them.
    compiled = config.compile != "none"
    if operations == "auto":
        operations = next(name for name in OPERATIONS.names if device in OPERATIONS.facts(name).devices)
    stream, product = _WIDTHS[precision]
    return Form(OPERATIONS.facts(operations).reuses_memory, device, stream, product, compiled)


def held_by(
    config: ModelConfig, train: TrainConfig, parallel: ParallelConfig, optimizer: OptimizerConfig, ranks: int
) -> Held:
    """Return what a rank holds of the model: what the strategy's facts say."""
    facts = STRATEGIES.facts(parallel.strategy)
    updates = OPTIMIZERS.facts(optimizer.name)
    options = {**facts.options, **parallel.options}
    sharing = int(options.get("shard_ranks", 0)) or ranks  # one copy of the model
    share = dict.fromkeys(facts.shards, 1 / sharing)
    shared: dict[str, Any] = {
        "moments": updates.moments,
        "other_moments": updates.moments if updates.elementwise else 2,
        "of_weights": share.get("parameters", 1.0),
        "of_gradients": share.get("gradients", 1.0),
        "of_state": 0.0 if updates.on_host else share.get("optimizer", 1.0),
        "is_shared": sharing == ranks > 1 and "gather" in facts.uses and parallel.gather == "auto",
    }
    if "parameters" in facts.shards:  # the shards are the masters
        state = 2 if options.get("state_dtype") == "bf16" else 4
        units = facts.gathers if options.get("reshard_after_forward", True) else config.num_layers + 2
        return Held(weight=state, gradient=state, state=state, gathered_units=units, **shared)
    narrow = train.precision in ("bf16", "fp8") or parallel.weights == "bf16"
    gradient = 2 if narrow else 4
    bucket = parallel.bucket_mb * 2**20 / (gradient * count_parameters(config).total)
    packed = {"": 0.0, "bucket": min(1.0, bucket), "all": 1.0}[facts.packs]
    return Held(weight=gradient, gradient=gradient, master=4 if narrow else 0, packed=packed, **shared)


def _most(fits: Callable[[int], bool], largest: int = 1 << 20) -> int:
    """Return the largest number that fits, 0 if 1 does not; whatever is below one that fits fits, too."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= largest and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class Measured:
    """The largest peak memory (without a CUDA graph) and step time among the ranks; None: memory ran out."""

    peak_bytes: int | None
    seconds: float | None


def check(recipe: Recipe, *, ranks: int = 1) -> Measured:
    """Make a few steps of a recipe on this machine's GPUs."""
    from lmkit.parallel.launch import spawn_ranks

    if not torch.cuda.is_available():
        message = "--check: this machine shows no GPU to measure on"
        raise UsageError("plan.no_gpu", message, hint="leave out --check")
    try:
        return spawn_ranks(ranks, measure, (recipe,))  # in processes whose memory holds nothing else
    except LmkitError as error:
        if error.code != "memory.exhausted":
            raise
        return Measured(None, None)


def measure(recipe: Recipe) -> Measured:
    """Make a few steps as one of the ranks; return what one took on the rank that took most."""
    with ranks_of(recipe) as ranks:
        return measure_among(ranks, recipe)


def measure_among(ranks: Ranks, recipe: Recipe) -> Measured:
    """Do as `measure` in a process group that exists. Collective."""
    with numerics(recipe.run, ranks):
        made = plan(recipe, card_here(), ranks=ranks.world_size)
        claim_workspaces(ranks.device)
        before = memory_in_use(ranks.device)
        try:
            training = TrainingStep(recipe.changed(model=made.config, train=made.train), ranks)
            training.run(wait=True)
            with track_peak(ranks.device) as peak:
                seconds = _seconds(training)
            graph = training.step.graph
            if graph is not None and graph.captures is not False:
                for _ in range(WARM_UPS + MEASURED - 2):
                    training.run(wait=True)
            if largest_of_ranks([seconds], ranks)[0] < SHORT_S:
                samples = [_seconds(training, FEW)]
                more = int(SAMPLED_S / (FEW * largest_of_ranks(samples, ranks)[0]))
                seconds = median([*samples, *(_seconds(training, FEW) for _ in range(more))])
        except RuntimeError as error:
            raise limit_reached(error) or error from error
        peak_bytes, seconds = largest_of_ranks([peak.peak_bytes - before, seconds], ranks)
        return Measured(int(peak_bytes), seconds)


def _seconds(training: TrainingStep, steps: int = 1) -> float:
    started = time.perf_counter()
    for _ in range(steps - 1):
        training.run()
    training.run(wait=True)
    return (time.perf_counter() - started) / steps
