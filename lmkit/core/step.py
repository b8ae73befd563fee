"""One training step: gradients of the micro-batches, their mean over the ranks, clipping, agreement, update.

Gradients are clipped by their global norm (Pascanu et al. 2013, algorithm 1). `clip_gradients` clips parameters that
one process holds. It measures (`gradient_norm`) and scales (`clip_for`); ranks that hold parts of the
gradients add up their norms in between.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmkit.core.buckets import MIB, GradientBuckets


class Sync:
    """Average gradients over the ranks by buckets, if there is a process group. Make the group first.

    Args:
        parameters: of the model, in the same order on every rank. The caller gives every rank equal initial values.
        capacity: bytes of a bucket.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], capacity: int = 25 * MIB) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        has_ranks = dist.is_available() and dist.is_initialized()
        self.buckets = GradientBuckets(self.parameters, capacity) if has_ranks else None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate the gradients of the backward passes inside, without communication."""
        if self.buckets is not None:
            self.buckets.is_paused = True
        try:
            yield
        finally:
            if self.buckets is not None:
                self.buckets.is_paused = False

    def finish(self) -> None:
        """Average the gradients, after the last backward pass of a step."""
        if self.buckets is not None:
            self.buckets.finish()

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale the averaged gradients to a global norm of at most `max_norm`; return the norm before scaling."""
        return clip_gradients(self.parameters, max_norm)


class Step:
    """Turn batches into weight updates, the same on every rank.

    >>> from lmkit.core.adamw import AdamW
    >>> layer = torch.nn.Linear(3, 1)
    >>> loss = lambda inputs, targets: (layer(inputs) - targets).square().mean()
    >>> step = Step(loss, AdamW(layer.parameters()), Sync(layer.parameters()), max_norm=1.0)
    >>> step(torch.ones(2, 5, 3), torch.ones(2, 5, 1), lr=1e-3).shape  # two micro-batches of five rows
    torch.Size([])

    Args:
        loss: computes (inputs, targets) -> mean loss of a micro-batch, a scalar.
        optimizer: of the parameters.
        sync: averages gradients over the ranks.
        max_norm: largest norm of the gradient; inf does not clip.
    """

    def __init__(
        self,
        loss: Callable[[Tensor, Tensor], Tensor],
        optimizer: torch.optim.Optimizer,
        sync: Sync,
        *,
        max_norm: float = math.inf,
    ) -> None:
        self.loss, self.optimizer, self.sync, self.max_norm = loss, optimizer, sync, max_norm

    def __call__(self, inputs: Tensor, targets: Tensor, *, lr: float) -> Tensor:
        """Make one step; return this rank's mean loss, a scalar.

        If a loss or gradient is not finite on any rank, weights and optimizer state stay untouched on all ranks.
        After an exception, drop the gradients (`zero_grad`) and reset the buckets before the next step.

        Args:
            inputs, targets: (accumulation, rows, ...), a micro-batch each.
            lr: learning rate of all parameter groups, times the `lr_factor` of a group that has one.
        """
        loss = self.accumulate(inputs, targets)
        norm = self.reduce()
        if self.agree(torch.isfinite(loss + norm)):
            for group in self.optimizer.param_groups:
                group["lr"] = lr * group.get("lr_factor", 1.0)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def accumulate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run forward and backward over the micro-batches; return the mean loss, a scalar."""
        total = torch.zeros((), device=inputs.device)
        for index, (x, y) in enumerate(zip(inputs, targets, strict=True)):
            # Ranks communicate in the last backward pass only.
            with nullcontext() if index == len(inputs) - 1 else self.sync.no_sync():
                total += self.backward(x, y, index, len(inputs))
        return total / len(inputs)

    def backward(self, inputs: Tensor, targets: Tensor, index: int, count: int) -> Tensor:
        """Backpropagate loss / count; return the loss. All micro-batches weigh the same, however many targets they
        have.

        Args:
            index: of the micro-batch, of `count` in the step.
        """
        loss = self.loss(inputs, targets)
        (loss / count).backward()
        return loss.detach()

    def reduce(self) -> Tensor:
        """Average the gradients over the ranks and clip them; return their norm before clipping."""
        self.sync.finish()
        return self.sync.clip_gradients(self.max_norm)

    def agree(self, is_good: Tensor) -> bool:
        """Return whether `is_good` is true on every rank."""
        good = is_good.to(torch.int32)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(good, op=dist.ReduceOp.MIN)
        return bool(good)


def clip_gradients(parameters: Tensor | Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale the gradients in place by one factor, so that their joint norm is at most `max_norm`.

    >>> weight = torch.zeros(2, requires_grad=True)
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> clip_gradients([weight], max_norm=1.0)
    tensor(5.)
    >>> weight.grad
    tensor([0.6000, 0.8000])

    Args:
        parameters: those without a gradient are skipped.
        max_norm: inf measures without scaling.

    Returns:
        The norm before scaling, as a scalar tensor. If it is not finite, the gradients are of no use.

    Raises:
        ValueError: `max_norm` is not positive; a parameter has the attribute `whole_dim`, which
            `lmkit.parallel.FSDP` sets on a rank's part of a parameter.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else parameters
    parameters = list(parameters)
    if has_slices(parameters):
        raise ValueError(
            "these are one rank's parts of the parameters: call clip_grad_norm_ of lmkit's FSDP module"
        )
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = gradient_norm(grads)
    clip_for(None, grads, norm, max_norm)
    return norm


def has_slices(parameters: Iterable[Tensor]) -> bool:
    """Return whether `lmkit.parallel.FSDP` has left this rank only a part of some of the parameters."""
    return any(hasattr(parameter, "whole_dim") for parameter in parameters)


@torch.no_grad()
def gradient_norm(grads: list[Tensor]) -> Tensor:
    """Compute the joint Euclidean norm of tensors on one device, in float32 (in float64 if one of them is float64).

    Returns:
        A scalar tensor on their device; the host does not wait for it. The caller refuses a norm that is not finite.
    """
    if not grads:
        return torch.zeros(())
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        by_dtype.setdefault(grad.dtype, []).append(grad)
    wide = functools.reduce(torch.promote_types, by_dtype, torch.float32)
    norms: list[Tensor] = []
    # PyTorch works on a list of mixed dtypes tensor by tensor. Sorted: the sum has one order on every rank.
    for dtype in sorted(by_dtype, key=str):
        norms += torch._foreach_norm(by_dtype[dtype], 2, wide)
    return torch.linalg.vector_norm(torch.stack(norms))


@torch.no_grad()
def clip_for(
    optimizer: torch.optim.Optimizer | None, grads: list[Tensor], norm: Tensor, max_norm: float
) -> None:
    """Scale gradients, whose joint norm is `norm`, to a norm of at most `max_norm`.

    Args:
        optimizer: reads the gradients next. One with the attribute `gradient_factor`, such as `lmkit.optim.AdamW`,
            multiplies by it while it reads, which saves a pass over memory. Any other, or None: `grads` are scaled in
            place.
        grads: all gradients of the optimizer in this process.
        norm: joint norm of the gradients of all processes.
        max_norm: inf leaves the gradients as they are.

    Raises:
        ValueError: `max_norm` is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}")
    # 1e-6 as in PyTorch's clip_grad_norm_
    factor = None if math.isinf(max_norm) else (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if optimizer is not None and hasattr(optimizer, "gradient_factor"):
        optimizer.gradient_factor = factor
    elif grads and factor is not None:
        torch._foreach_mul_(grads, factor)
