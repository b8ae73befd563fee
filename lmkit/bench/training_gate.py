"""Check a training before it is timed: its first steps beside the same steps of one process on the whole batch.

What is compared, step by step: the loss, the norm of the mean gradient, gradients where every rank has whole ones,
and what the weights have changed by since the start. Of large tensors, elements at random places are compared.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lmkit.bench.failures import failure_is_a_row, wrong_result
from lmkit.bench.summary import UNCHECKED
from lmkit.core.batches import Batch, BatchSource
from lmkit.measure.memory import release_memory
from lmkit.model.names import parameter_names
from lmkit.parallel.ranks import Ranks
from lmkit.recipe.schema import Recipe
from lmkit.registry import ATTENTION, OPTIMIZERS, STRATEGIES
from lmkit.training.run_data import make_batches
from lmkit.training.setup import ALONE, RANDOM, TrainingStep

STEPS = 3
"""Some strategies average in every second step only, and the first gradients say nothing of the optimizer's step."""
LR = 1e-5
"""A small learning rate: weights that move far carry the rounding errors of one step into the next."""
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
        norm: of the mean gradient.
        gradients: means over the whole batch, in units of their joint norm, which clipping may have changed; none
            where ranks share them out.
        start, weights: before the first step, and after this one; only those that this rank has whole.
    """

    loss: float
    norm: float
    gradients: Numbers
    start: Numbers
    weights: Numbers


def budget_of(precision: str) -> Budget:
    """Return the budget of a precision of [train]."""
    return {"fp32": EXACT, "fp8": COARSE}.get(precision, ROUNDED)


def reference(
    recipe: Recipe, device: torch.device, batches: BatchSource | None = None, **changes: Any
) -> Reference:
    """Follow the recipe's training in one process, row by row; return why not if that fails.

    Args:
        batches: of the whole batch; None: random tokens, as `TrainingStep` draws them.
        changes: of `TrainingStep`.
    """
    plain = recipe.changed(model={"compile": "none"}, train={"cuda_graph": "off"})
    alone = Ranks(device=device)
    whole = make_batches(plain, RANDOM, alone) if batches is None else batches
    row: dict[str, Any] = {}
    found: Reference = ""
    with failure_is_a_row(row, device):
        found = follow(TrainingStep(plain, alone, _RowByRow(whole), **({"parallel": ALONE} | changes)))
    release_memory(device)
    return found or f"the reference in one process: {row['status']}: {row['detail']}"


def agreed(found: Reference, ranks: Ranks) -> Reference:
    """Return this rank's steps if every rank has some, else why one has none. Collective."""
    of_ranks: list[Any] = [found if isinstance(found, str) else ""] * ranks.world_size
    if ranks.world_size > 1:
        dist.all_gather_object(of_ranks, of_ranks[0])
    return next(filter(None, of_ranks), found)


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


def follow(training: TrainingStep) -> list[Seen]:
    """Make `STEPS` steps and return what each made. Collective."""
    start = _weights(training)
    return [_see(training, start) for _ in range(STEPS)]


def _see(training: TrainingStep, start: Numbers) -> Seen:
    gradients: Numbers = {}

    def note() -> None:
        gradients.update(_named(training, lambda parameter: parameter.grad))

    config = getattr(training.step.sync, "config", ALONE)
    shards = STRATEGIES.facts(config.strategy).shards
    training.run(lr=LR, before_update=None if shards else note)
    outcome = training.outcome
    loss = outcome.loss if config.strategy == "none" else outcome.losses.mean()
    size = sum((float(x.double().square().sum()) for x in gradients.values()), 0.0) ** 0.5 or 1.0
    return Seen(
        float(loss),
        float(outcome.grad_norm),
        {name: x.float() / size for name, x in gradients.items()},
        start,
        _weights(training),
    )


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
    for parameter, shapes in parameter_names(training.model).items():
        if (tensor := value(parameter)) is not None:
            parts = tensor.detach().reshape(-1).split([shape.numel() for shape in shapes.values()])
            found |= {name: _sample(part) for name, part in zip(shapes, parts, strict=True)}
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
        scalars = {"the loss": own.loss / true.loss, "the norm of the mean gradient": own.norm / true.norm}
        found = {what: abs(ratio - 1) for what, ratio in scalars.items()}
        least = budget.floor * _size(torch.cat(list(true.gradients.values())))
        for name, gradient in own.gradients.items():
            wanted = true.gradients[name]
            found[f"the gradient of {name}"] = _size(gradient - wanted) / max(_size(wanted), least)
        moved = (name for name in own.weights if _size(true.gradients[name]) >= least)
        changes = {f"the change of {name}": _change(name, own, true) for name in moved}
        # One flipped sign among n elements is a relative error of 2 / sqrt(n).
        limits = dict.fromkeys(found, budget.gradients)
        limits |= {
            f"the change of {name}": budget.changes * (1 + 2 / math.sqrt(own.weights[name].numel()))
            for name in own.weights
        }
        for what, error in sorted([*found.items(), *changes.items()], key=lambda x: -x[1] / limits[x[0]]):
            if not error <= limits[what]:  # so that NaN is a fault
                return (
                    f"step {number}: {what}: relative error {error:.2g} against one process, "
                    f"allowed {limits[what]:.2g}"
                )
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


def forward_fault(training: TrainingStep, budget: Budget) -> dict[str, Any]:
    """Return status and detail if the forward pass without gradients differs from the one with gradients, else {}.

    Use it after `judge`, which checks the pass with gradients. Loss and hidden states of every token are compared.
    """
    hidden: list[Tensor] = []
    with training.model.lm_head.register_forward_pre_hook(lambda _, x: hidden.append(x[0].detach().float())):
        alone, right = training.forward(), training.forward_backward()
    mine, wanted = hidden
    errors = {
        "the loss": abs(float(alone / right) - 1),
        "the hidden state of a token": float(((mine - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max()),
    }
    for what, error in errors.items():
        if not error <= budget.gradients:  # so that NaN is a fault
            return wrong_result(
                f"without gradients: {what}: relative error {error:.2g}, allowed {budget.gradients:.2g}"
            )
    return {}


def replicas_differ(training: TrainingStep, ranks: Ranks) -> str:
    """Return which rank's weights are not equal to rank 0's where each rank has whole ones, or "". Collective."""
    strategy = getattr(training.step.sync, "config", ALONE).strategy
    if ranks.world_size == 1 or strategy == "none" or "parameters" in STRATEGIES.facts(strategy).shards:
        return ""
    training.wait_for_weights()
    digest = hashlib.sha256()
    for sample in _named(training, lambda parameter: parameter).values():
        digest.update(sample.contiguous().view(torch.uint8).numpy().tobytes())
    of_ranks: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(of_ranks, digest.digest())
    other = next((rank for rank, theirs in enumerate(of_ranks) if theirs != of_ranks[0]), None)
    return "" if other is None else f"after timing: the weights of rank {other} are not equal to rank 0's"


def judge(
    training: TrainingStep, theirs: Reference, budget: Budget, ranks: Ranks | None = None
) -> tuple[dict[str, Any], list[float]]:
    """Make the first `STEPS` steps of a training; return fields of its row, and their losses. Collective.

    Args:
        theirs: of `reference`; text: nothing is checked, and the row says why.
        ranks: that train together, and get the same fields.
    """
    own = follow(training)
    losses = [seen.loss for seen in own]
    if isinstance(theirs, str):
        return {"status": "ok", UNCHECKED: theirs}, losses
    of_ranks: list[Any] = [fault(own, theirs, budget)]
    if ranks is not None and ranks.world_size > 1:
        of_ranks *= ranks.world_size
        dist.all_gather_object(of_ranks, of_ranks[0])
        of_ranks = [f"rank {rank}: {wrong}" if wrong else "" for rank, wrong in enumerate(of_ranks)]
    wrong = next(filter(None, of_ranks), "")
    if wrong:
        return wrong_result(wrong), losses
    shared = unchecked(training.recipe)
    return {"status": "ok", **({UNCHECKED: shared} if shared else {})}, losses
