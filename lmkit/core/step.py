"""One training step: gradients of the micro-batches, their mean over the ranks, clipping, agreement, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmkit.core.buckets import MIB, GradientBuckets
from lmkit.core.clipping import clip_gradients


class Sync:
    """Average gradients over the ranks by buckets, if there is a process group.

    Args:
        parameters: of the model, the same on every rank.
        capacity: bytes of a bucket.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], capacity: int = 25 * MIB) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        has_ranks = dist.is_available() and dist.is_initialized()
        self.buckets = GradientBuckets(self.parameters, capacity) if has_ranks else None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate the gradients of the passes inside, without communication."""
        if self.buckets is not None:
            self.buckets.is_paused = True
        yield
        if self.buckets is not None:
            self.buckets.is_paused = False

    def finish(self, *, wait: bool = True) -> None:
        """Average the gradients, after the last backward pass of a step.

        Args:
            wait: if False, `clip_gradients` and the optimizer may wait for gradients that are still in flight.
        """
        if self.buckets is not None:
            self.buckets.finish()

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale the gradients to a global norm of at most `max_norm`; return the norm before that."""
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

        Args:
            inputs, targets: (accumulation, rows, ...), a micro-batch each.
            lr: learning rate of all parameter groups.
        """
        loss = self.accumulate(inputs, targets)
        norm = self.reduce()
        if self.agree(torch.isfinite(loss + norm)):
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def accumulate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run forward and backward over the micro-batches; return the mean loss, a scalar."""
        total = torch.zeros((), device=inputs.device)
        for index, (ids, wanted) in enumerate(zip(inputs, targets, strict=True)):
            # Ranks communicate in the last backward pass only.
            with nullcontext() if index == len(inputs) - 1 else self.sync.no_sync():
                total += self.backward(ids, wanted, index, len(inputs))
        return total / len(inputs)

    def backward(self, inputs: Tensor, targets: Tensor, index: int, count: int) -> Tensor:
        """Add the gradients of micro-batch `index` of `count`, a share of the mean; return its loss."""
        loss = self.loss(inputs, targets)
        (loss / count).backward()
        return loss.detach()

    def reduce(self) -> Tensor:
        """Average the gradients over the ranks and clip them; return their norm before that."""
        self.sync.finish(wait=False)  # clipping waits for the gradients that it reads
        return self.sync.clip_gradients(self.max_norm)

    def agree(self, is_good: Tensor) -> bool:
        """Return whether `is_good` is true on every rank."""
        good = is_good.to(torch.int32)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(good, op=dist.ReduceOp.MIN)
        return bool(good)
