"""Check a training before and after it is timed.

Before: its first steps beside the same steps of one process on the whole batch (`judge`). What is compared, step by
step: the loss, the norm of the mean gradient, gradients where every rank has whole ones, and what the weights have
changed by since the start. Of large tensors, elements at random places are compared.

After: a step on random tokens beside the mean gradient by PyTorch's operations on the same weights (`after_timing`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lmkit.attention import attention_function, joined_function
from lmkit.bench.failures import failure_is_a_row, wrong_result
from lmkit.bench.summary import UNCHECKED
from lmkit.core.batches import Batch, BatchSource
from lmkit.core.step import gradient_norm
from lmkit.measure.memory import release_memory
from lmkit.model.operations import PLAIN, Operations
from lmkit.model.transformer import parameter_names
from lmkit.parallel.ranks import Ranks
from lmkit.recipe.recipe import Recipe
from lmkit.registry import ATTENTION, OPTIMIZERS, STRATEGIES
from lmkit.training.precision import autocast
from lmkit.training.run_data import make_batches
from lmkit.training.setup import ALONE, RANDOM, TrainingStep

STEPS = 3
"""Some strategies average in every second step only, and the first gradients say nothing of the optimizer's step."""
CLIPPED_TO = 0.1
"""Norm to which the second step clips where strategies are judged, in units of the first step's norm."""
LR = 1e-5
"""A small learning rate: weights that move far carry the rounding errors of one step into the next."""
STILL = 1e-30
"""A learning rate that moves no weight, and that optimizers may divide by."""
SAMPLED = 4096
EDGE = 64


class Budget(NamedTuple):
    """Largest relative errors against the single-process reference.

    Attributes:
        gradients: of each gradient, of the loss and of the gradient norm.
        changes: of the change of a weight with many elements. AdamW normalizes each gradient, so rounding can flip
            the sign of a small update; `fault` allows more for a weight of few elements.
        floor: share of the root mean square of all gradients. A smaller gradient is divided by this share instead of
            its own size, and the weights of such a gradient are not compared.
    """

    gradients: float
    changes: float
    floor: float


EXACT = Budget(1e-3, 0.03, 2e-3)
"""float32: sums in another order differ by 1e-6, and changes of weights by 1e-2."""
ROUNDED = Budget(0.1, 0.7, 0.05)
"""Products, weights or messages (`bf16`, `bf16 wire`, `bf16 states`) that are rounded to 16 bits. Right trainings of
24 layers differ by up to 0.04 and 0.43; the gradients of one of two ranks differ from the mean by 0.8, its changes
by 1."""
COARSE = Budget(0.3, 0.9, 0.05)
"""Products in fp8."""
Numbers = dict[str, Tensor]
"""Name of a parameter in checkpoints -> elements in host memory."""
Reference = list["Seen"] | str
"""The steps of one process, or why there are none."""


@dataclass(frozen=True)
class Seen:
    """What one step made of a training.

    Attributes:
        loss: mean over the rows that it trains on: the whole batch, or with `none` those of this rank.
        norm: of the mean gradient, before clipping.
        clipped: the norm that the optimizer reads; None where ranks share the gradients out.
        gradients: means over the whole batch, in units of their joint norm, which clipping may have changed; none
            where ranks share them out.
        start, weights: before the first step, and after this one; only those that this rank has whole.
        forward: relative errors of the forward pass without gradients, against the one with gradients.
    """

    loss: float
    norm: float
    gradients: Numbers
    clipped: float | None = None
    start: Numbers = field(default_factory=dict)
    weights: Numbers = field(default_factory=dict)
    forward: dict[str, float] = field(default_factory=dict)


def budget_of(precision: str) -> Budget:
    return {"fp32": EXACT, "fp8": COARSE}.get(precision, ROUNDED)


def reference(
    recipe: Recipe, ranks: Ranks, batches: BatchSource | None = None, *, accumulates: bool = False
) -> Reference:
    """Follow the recipe's training in one process, row by row; return why not if that fails on any rank. Collective.

    Args:
        batches: of the whole batch; None: random tokens, as `TrainingStep` draws them.
        accumulates: as of `follow`.
    """
    plain = recipe.changed(model={"compile": "none"}, train={"cuda_graph": "off"})
    alone = Ranks(device=ranks.device)
    row: dict[str, Any] = {}
    found: Reference = ""
    with failure_is_a_row(row, ranks.device):
        rows = _RowByRow(make_batches(plain, RANDOM, alone) if batches is None else batches)
        found = follow(TrainingStep(plain, alone, rows, parallel=ALONE), accumulates=accumulates)
    release_memory(ranks.device)
    why = "" if found else f"the reference in one process: {row['status']}: {row['detail']}"
    return _on_any_rank(why, ranks) or found


def of_pytorch(recipe: Recipe) -> Recipe:
    """Return the recipe with PyTorch's attention and operations instead of the ones that it names.

    Attention that does not see all keys stays: PyTorch's computes something else.
    """
    assert recipe.train is not None
    assert recipe.model is not None
    precision = {"fp8": "bf16"}.get(recipe.train.precision, recipe.train.precision)
    attention = "sdpa" if ATTENTION.facts(recipe.model.attention).sees_all else recipe.model.attention
    plain = {"attention": attention, "operations": "plain", "activation_checkpointing": "none"}
    return recipe.changed(model=plain, train={"precision": precision})


@dataclass(frozen=True)
class _RowByRow:
    """Cut batches into micro-batches of one row: one process then needs the memory of one row."""

    batches: BatchSource

    def batch(self, step: int) -> Batch:
        inputs, targets = (x.reshape(-1, 1, x.shape[-1]) for x in self.batches.batch(step))
        return inputs, targets


def follow(training: TrainingStep, *, forward: bool = False, accumulates: bool = False) -> list[Seen]:
    """Make `STEPS` steps and return what each made. Collective.

    Args:
        forward: also run each forward pass without gradients.
        accumulates: the second step accumulates two batches and clips their gradient to `CLIPPED_TO`.
    """
    start, step = _weights(training), training.step
    made: list[Seen] = []
    max_norm = step.max_norm
    for number in range(STEPS):
        batch = None
        if accumulates and number == 1:
            (inputs, targets), (more, wanted) = training.next_batch(), training.next_batch()
            batch = torch.cat((inputs, more)), torch.cat((targets, wanted))
            step.max_norm = CLIPPED_TO * made[0].norm
        seen = _see(training, lr=LR, batch=batch, forward=forward)
        step.max_norm = max_norm
        made.append(replace(seen, start=start, weights=_weights(training)))
    return made


def _see(
    training: TrainingStep,
    *,
    lr: float,
    batch: Batch | None = None,
    forward: bool = False,
    graph: bool = False,
) -> Seen:
    """Make a step and return what it made, without weights. Collective.

    Args:
        batch: in place of the next one.
        forward: also run the forward pass without gradients.
        graph: let the training's CUDA graph make the step, whose gradients are then not seen.
    """
    gradients: Numbers = {}
    clipped: float | None = None
    hidden: list[Tensor] = []
    alone: list[Tensor] = []
    config = getattr(training.step.sync, "config", ALONE)

    def note() -> None:
        nonlocal clipped
        if not STRATEGIES.facts(config.strategy).shards:
            gradients.update(_named(training, lambda parameter: parameter.grad))
            factor = getattr(training.optimizer, "gradient_factor", None)
            whole = gradient_norm([p.grad for p in training.model.parameters() if p.grad is not None])
            clipped = float(whole if factor is None else whole * factor)
        if forward:
            alone.append(training.forward())

    def keep(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        hidden.append(arguments[0].detach().float())

    with training.model.lm_head.register_forward_pre_hook(keep) if forward else nullcontext():
        training.run(lr=lr, batch=batch, before_update=None if graph else note)
    outcome = training.outcome
    errors: dict[str, float] = {}
    if forward:
        right, mine = hidden
        errors["the loss without gradients"] = abs(float(alone[0] / outcome.loss) - 1)
        distances = (mine - right).norm(dim=-1) / right.norm(dim=-1)
        errors["the hidden state of a token without gradients"] = float(distances.max())
    loss = outcome.loss if config.strategy == "none" else outcome.losses.mean()
    return Seen(float(loss), float(outcome.grad_norm), _in_units_of_norm(gradients), clipped, forward=errors)


def _in_units_of_norm(gradients: Numbers) -> Numbers:
    size = sum((float(x.double().square().sum()) for x in gradients.values()), 0.0) ** 0.5 or 1.0
    return {name: x.float() / size for name, x in gradients.items()}


def _weights(training: TrainingStep) -> Numbers:
    """Return the weights that this rank has whole. Collective."""
    training.wait_for_weights()
    saved = training.step.sync.weights_to_save()
    if saved is not None:
        return {name: _sample(weight) for name, weight in saved.items()}
    return _named(training, lambda p: p.full_tensor() if isinstance(p, DTensor) else p)


def _named(training: TrainingStep, value: Callable[[nn.Parameter], Tensor | None]) -> Numbers:
    """Return a sample of a value of every parameter that has it, by the names of checkpoints."""
    found: Numbers = {}
    for parameter, name in parameter_names(training.model).items():
        if (tensor := value(parameter)) is not None:
            found[name] = _sample(tensor.detach())
    return found


def _sample(tensor: Tensor) -> Tensor:
    """Return all elements of a small tensor; of a large one the first, the last, and others at random."""
    flat, size = tensor.reshape(-1), tensor.numel()
    if size > SAMPLED:
        random = torch.randint(size, (SAMPLED,), generator=torch.Generator().manual_seed(size))
        places = torch.cat((torch.arange(EDGE), random, torch.arange(size - EDGE, size)))
        flat = flat[places.to(flat.device)]
    return flat.to("cpu", copy=True)


def fault(mine: Sequence[Seen], theirs: Sequence[Seen], budget: Budget) -> str:
    """Describe the error of the first wrong step that exceeds its budget by the largest factor; else return ""."""
    for number, (own, true) in enumerate(zip(mine, theirs, strict=True), 1):
        if wrong := _difference(own, true, budget):
            return f"step {number}: {wrong}"
    return ""


def _difference(own: Seen, true: Seen, budget: Budget) -> str:
    scalars = {"the loss": own.loss / true.loss, "the norm of the mean gradient": own.norm / true.norm}
    if own.clipped is not None and true.clipped is not None:
        scalars["the norm of the clipped gradient"] = own.clipped / true.clipped
    found = {what: abs(ratio - 1) for what, ratio in scalars.items()} | own.forward
    least = budget.floor * _size(torch.cat([torch.zeros(1), *true.gradients.values()]))
    for name, gradient in own.gradients.items():
        wanted = true.gradients[name]
        found[f"the gradient of {name}"] = _size(gradient - wanted) / max(_size(wanted), least)
    moved = (name for name in own.weights if _size(true.gradients[name]) >= least)
    changes = {f"the change of {name}": _change(name, own, true) for name in moved}
    limits = dict.fromkeys(found, budget.gradients)
    for name, weight in own.weights.items():  # one flipped sign among n is a relative error of 2 / sqrt(n)
        limits[f"the change of {name}"] = budget.changes * (1 + 2 / math.sqrt(weight.numel()))
    for what, error in sorted([*found.items(), *changes.items()], key=lambda x: -x[1] / limits[x[0]]):
        if not error <= limits[what]:  # so that NaN is a fault
            return f"{what}: relative error {error:.2g}, allowed {limits[what]:.2g}"
    return ""


def _change(name: str, own: Seen, true: Seen) -> float:
    """Compare the changes of a weight since the start, in the narrower dtype of both, to its last digit."""
    weight = own.weights[name]
    dtype = min(weight.dtype, true.weights[name].dtype, key=lambda dtype: dtype.itemsize)
    mine, wanted = (
        seen.weights[name].to(dtype).float() - seen.start[name].to(dtype).float() for seen in (own, true)
    )
    last_digit = torch.finfo(dtype).eps * _size(weight) if dtype.itemsize < 4 else 0.0
    return max(0.0, _size(mine - wanted) - last_digit) / max(_size(wanted), 1e-30)


def _size(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def unchecked(recipe: Recipe) -> str:
    """Return what of a training the reference shares with it, so that nothing checks it, or ""."""
    assert recipe.model is not None
    kernel, optimizer = recipe.model.attention, recipe.optimizer.name
    parts = [] if ATTENTION.facts(kernel).sees_all else [f"the keys that {kernel} sees"]
    if not OPTIMIZERS.load(optimizer).__module__.startswith("lmkit."):
        parts.append(f"optimizer updates of {optimizer}")
    return " and ".join(parts)


def replicas_differ(training: TrainingStep) -> str:
    """Return which rank's weights are not equal to rank 0's where each rank has whole ones, or "". Collective."""
    strategy, ranks = getattr(training.step.sync, "config", ALONE).strategy, training.step.ranks
    if ranks.world_size == 1 or strategy == "none" or "parameters" in STRATEGIES.facts(strategy).shards:
        return ""
    training.wait_for_weights()
    digest = hashlib.sha256()
    for sample in _named(training, lambda parameter: parameter).values():
        digest.update(sample.contiguous().view(torch.uint8).numpy().tobytes())
    of_ranks: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(of_ranks, digest.digest())
    other = next((rank for rank, theirs in enumerate(of_ranks) if theirs != of_ranks[0]), None)
    return "" if other is None else f"the weights of rank {other} are not equal to rank 0's"


def _on_any_rank(wrong: str, ranks: Ranks) -> str:
    """Return the fault of the first rank that has one, or "". Collective."""
    if ranks.world_size == 1:
        return wrong
    of_ranks: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(of_ranks, wrong)
    return next((f"rank {rank}: {theirs}" for rank, theirs in enumerate(of_ranks) if theirs), "")


def judge(
    training: TrainingStep,
    theirs: Reference,
    budget: Budget,
    *,
    forward: bool = False,
    accumulates: bool = False,
) -> tuple[dict[str, Any], list[float]]:
    """Make the first `STEPS` steps of a training; return fields of its row, and their losses. Collective.

    Ranks that train together get the same fields.

    Args:
        theirs: of `reference`; text: nothing is checked, and the row says why.
        forward: whether the forward pass without gradients is used, too, and to be checked.
        accumulates: as of `follow`; the reference must have done the same.
    """
    own = follow(training, forward=forward, accumulates=accumulates)
    losses = [seen.loss for seen in own]
    if isinstance(theirs, str):
        return {"status": "ok", UNCHECKED: theirs}, losses
    if wrong := _on_any_rank(fault(own, theirs, budget), training.step.ranks):
        return wrong_result(wrong), losses
    shared = unchecked(training.recipe)
    return {"status": "ok", **({UNCHECKED: shared} if shared else {})}, losses


def after_timing(training: TrainingStep, budget: Budget, *, forward: bool = False) -> dict[str, Any]:
    """Check a training that was timed once more: return status and detail if it is wrong by now, else {}. Collective.

    A step on random tokens that moves no weight is compared with the mean gradient by PyTorch's operations, on the
    weights of now. The strategy takes no part in that gradient unless it shards parameters. If there is a CUDA graph,
    it makes the step, too, and is then dropped.

    Args:
        forward: as in `judge`.
    """
    step = training.step
    wrong = replicas_differ(training)
    if not wrong and step.skipped:
        wrong = "the loss or gradient of a step was not finite"
    if not wrong:
        batch = training.random_batch()
        mine = [_see(training, lr=STILL, batch=batch, graph=True)] if step.graph is not None else []
        step.graph = None
        mine.append(_see(training, lr=STILL, batch=batch, forward=forward))
        plain = of_pytorch(training.recipe).model
        assert plain is not None
        with torch.compiler.set_stance("force_eager"), computing_with(training.model, PLAIN, plain.attention):
            theirs = _without_strategy(training, batch) or _see(training, lr=STILL, batch=batch)
        wrong = next(filter(None, (_difference(seen, theirs, budget) for seen in mine)), "")
        wrong = _on_any_rank(wrong, step.ranks)
    return wrong_result(f"after timing: {wrong}") if wrong else {}


def _without_strategy(training: TrainingStep, batch: Batch) -> Seen | None:
    """Return the loss and the gradients of a batch, averaged over the ranks without the strategy. Collective.

    None: parameters are sharded, or gradients in fp16 need the step's loss scale.
    """
    step, model = training.step, training.model
    config = getattr(step.sync, "config", ALONE)
    if "parameters" in STRATEGIES.facts(config.strategy).shards or step.precision == "fp16":
        return None
    training.wait_for_weights()
    named = {name: parameter for parameter, name in parameter_names(model).items() if parameter.requires_grad}
    loss = torch.zeros((), device=batch[0].device)
    gradients: dict[str, Tensor] = {}
    for ids, targets in zip(*batch, strict=True):
        with autocast(ids.device, step.precision):
            part = model.loss(ids, targets) / len(batch[0])
        # Unlike `backward`, this calls no hook of the strategy.
        found = torch.autograd.grad(part, list(named.values()), allow_unused=True)
        loss += part.detach()
        for name, gradient in zip(named, found, strict=True):
            if gradient is not None:
                gradients[name] = gradients[name] + gradient if name in gradients else gradient.float()
    if step.ranks.world_size > 1 and config.strategy != "none":
        for value in (loss, *gradients.values()):
            dist.all_reduce(value)
            value /= step.ranks.world_size
    norm = float(gradient_norm(list(gradients.values())))
    return Seen(float(loss), norm, _in_units_of_norm({name: _sample(x) for name, x in gradients.items()}))


@contextmanager
def computing_with(model: Any, operations: Operations, attention: str) -> Iterator[None]:
    """Compute with other operations and another attention kernel inside the block."""
    before = model.operations, [(b.attn.attention, b.attn.joined_attention) for b in model.layers]
    model.operations = operations
    _attend_by(model, [(attention_function(attention), joined_function(attention))] * len(model.layers))
    try:
        yield
    finally:
        model.operations = before[0]
        _attend_by(model, before[1])


def _attend_by(model: Any, functions: list[tuple[Any, Any]]) -> None:
    for block, (attention, joined) in zip(model.layers, functions, strict=True):
        block.attn.attention, block.attn.joined_attention = attention, joined
