"""One optimizer step: gradients of the micro-batches, agreement between ranks, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from lmkit.measure.ranges import range_
from lmkit.parallel.collectives import agree
from lmkit.parallel.protocol import GradientSync
from lmkit.parallel.ranks import Ranks
from lmkit.training.state import LossScaleState

GROWTH_INTERVAL = 2000


INITIAL = 65536.0


SMALLEST = 1.0


class LossScale:
    """The factor, and when to change it."""

    def __init__(self) -> None:
        self.scale = INITIAL
        self._good_steps = 0

    def unscale_(self, parameters: Iterable[torch.Tensor]) -> None:
        """Divide the gradients by the factor."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, 1.0 / self.scale)

    def shrink(self) -> bool:
        """After an overflow: halve the factor. False if it cannot shrink any more: then the overflow is real."""
        self._good_steps = 0
        if self.scale <= SMALLEST:
            return False
        self.scale /= 2
        return True

    def keep(self) -> None:
        """After a good step."""
        self._good_steps += 1
        if self._good_steps >= GROWTH_INTERVAL:
            self._good_steps = 0
            self.scale *= 2

    def restore(self, state: LossScaleState) -> None:
        """Go on from a checkpoint."""
        self.scale, self._good_steps = state.scale, state.good_steps

    def state(self) -> LossScaleState:
        return LossScaleState(scale=self.scale, good_steps=self._good_steps)


PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class TrainableModel(Protocol):
    """What a step asks of a model: the mean loss of (rows, seq) ids, in nats per token."""

    def loss(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class Outcome:
    """What one step came to. Tensors stay on the device until somebody reads them.

    Attributes:
        loss: mean over this rank's rows, in nats per token.
        grad_norm: of the mean gradient over all ranks, before clipping.
        applied: whether the optimizer moved the weights.
        nonfinite: some rank saw a loss or gradient that is not finite (and it was no overflow of loss scaling).
        stop: some rank was asked to stop.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor
    applied: bool
    nonfinite: bool
    stop: bool


class Step:
    """Turns batches into weight updates; the same on every rank.

    Args:
        model: what `GradientSync.attach` returned: `model.loss(ids, targets)` is the mean loss.
        precision: of the matrix products: "fp32", "bf16" or "fp16" (with loss scaling).
        grad_clip: largest norm of the gradient; 0 does not clip.
    """

    def __init__(
        self,
        model: TrainableModel,
        optimizer: torch.optim.Optimizer,
        sync: GradientSync,
        ranks: Ranks,
        *,
        precision: str,
        grad_clip: float,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._sync = sync
        self._ranks = ranks
        self._precision = precision
        self._max_norm = grad_clip or math.inf
        self.loss_scale = LossScale() if precision == "fp16" else None

    def accumulate(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Run forward and backward over the micro-batches; return the mean loss (a scalar on the device).

        Args:
            inputs, targets: int64, (accumulation, rows, seq), on the device.
        """
        total = torch.zeros((), device=inputs.device)
        scale = (1.0 if self.loss_scale is None else self.loss_scale.scale) / len(inputs)
        for index, (ids, wanted) in enumerate(zip(inputs, targets, strict=True)):
            is_last = index == len(inputs) - 1
            with nullcontext() if is_last else self._sync.no_sync():
                with range_("forward"), autocast(self._ranks.device, self._precision):
                    loss = self._model.loss(ids, wanted)  # (rows, seq) -> scalar
                with range_("backward"):
                    (loss * scale).backward()
            total += loss.detach().float()
        return total / len(inputs)

    def update(
        self, loss: torch.Tensor, *, lr: float, stop: bool, before_update: Callable[[], None]
    ) -> Outcome:
        """Reduce and clip the gradients, agree with the other ranks, and let the optimizer act.

        Nothing has touched the weights or the optimizer's state when a loss or gradient turns out not to be
        finite on any rank.

        Args:
            stop: this rank was asked to stop.
            before_update: called when it is certain that the weights are about to change.
        """
        with range_("sync"):
            # Unscaling reads gradients itself; clipping waits for what it reads.
            self._sync.finish(wait=self.loss_scale is not None)
        with range_("clip"):
            if self.loss_scale is not None:
                self.loss_scale.unscale_(self._held_parameters())
            norm = self._sync.clip_gradients(self._max_norm)
        bad = ~(torch.isfinite(loss) & torch.isfinite(norm))
        agreed = agree(self._ranks, stop=stop, nonfinite=bad)
        if agreed.nonfinite:
            self._optimizer.zero_grad(set_to_none=True)
            overflow = self.loss_scale is not None and self.loss_scale.shrink()
            return Outcome(loss, norm, applied=False, nonfinite=not overflow, stop=agreed.stop)
        before_update()
        with range_("optimizer"):
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        if self.loss_scale is not None:
            self.loss_scale.keep()
        return Outcome(loss, norm, applied=True, nonfinite=False, stop=agreed.stop)

    def _held_parameters(self) -> list[torch.Tensor]:
        """What the optimizer works on: the model's parameters, or this rank's flat shards."""
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]


def autocast(device: torch.device, precision: str) -> AbstractContextManager:
    """Let matrix products run in `precision`; for "fp32" change nothing."""
    dtype = PRECISIONS[precision]
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)
