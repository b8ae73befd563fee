"""Make one optimizer step: gradients of the micro-batches, agreement between ranks, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from lmkit.data.batches import Batch, BatchSource
from lmkit.measure.ranges import range_
from lmkit.model.transformer import TransformerLM
from lmkit.parallel.collectives import agree
from lmkit.parallel.protocol import GradientSync
from lmkit.parallel.ranks import Ranks
from lmkit.training.state import LossScaleState

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
GROWTH_INTERVAL = 2000
INITIAL_SCALE = 65536.0
SMALLEST_SCALE = 1.0


def autocast(device: torch.device, precision: str) -> AbstractContextManager:
    """Run matrix products in `precision`; for "fp32" change nothing."""
    dtype = PRECISIONS[precision]
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def load_batch(batches: BatchSource, step: int, device: torch.device) -> Batch:
    """Return the batch of a step on the device. On GPUs the copy is asynchronous."""
    with range_("data"):
        inputs, targets = batches.batch(step)
        if device.type == "cuda":
            inputs, targets = inputs.pin_memory(), targets.pin_memory()
        return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)


class TrainableModel(Protocol):
    """What a step needs of a model: the mean loss of (rows, seq) ids, in nats per token."""

    def loss(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class Outcome:
    """The result of one step. Tensors stay on the device until somebody reads them.

    Attributes:
        loss: mean over this rank's rows, in nats per token.
        grad_norm: norm of the mean gradient over all ranks, before clipping.
        applied: whether the optimizer changed the weights.
        nonfinite: some rank saw a loss or gradient that is not finite (and loss scaling did not cause it).
        stop: some rank was asked to stop.
        save: some rank wants a checkpoint of this step.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor
    applied: bool
    nonfinite: bool
    stop: bool
    save: bool = False


class Step:
    """Turn batches into weight updates, the same on every rank. `lmkit.training.build_step` makes one.

    Args:
        model: the plain model.
        call: what `GradientSync.attach` returned for it: `call.loss(ids, targets)` is the mean loss.
        precision: of the matrix products: "fp32", "bf16" or "fp16" (with loss scaling).
        grad_clip: largest norm of the gradient; 0 does not clip.

    Example: `outcome = step(inputs, targets, lr=1e-3)`.
    """

    def __init__(
        self,
        model: TransformerLM,
        call: TrainableModel,
        optimizer: torch.optim.Optimizer,
        sync: GradientSync,
        ranks: Ranks,
        *,
        precision: str = "fp32",
        grad_clip: float = 0.0,
    ) -> None:
        self.model = model
        self.call = call
        self.optimizer = optimizer
        self.sync = sync
        self.ranks = ranks
        self._max_norm = grad_clip or math.inf
        self.set_precision(precision)

    def set_precision(self, precision: str) -> None:
        """Change the precision of the matrix products; weights and optimizer state stay."""
        self.precision = precision
        self.loss_scale = LossScale() if precision == "fp16" else None

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor, *, lr: float) -> Outcome:
        """Make one whole step: `accumulate`, then `update`.

        Args:
            inputs, targets: int64, (accumulation, rows, seq); moved to the device.
        """
        device = self.ranks.device
        return self.update(self.accumulate(inputs.to(device), targets.to(device)), lr=lr)

    def accumulate(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Run forward and backward over the micro-batches; return the mean loss (a scalar on the device).

        Args:
            inputs, targets: int64, (accumulation, rows, seq), on the device.
        """
        total = torch.zeros((), device=inputs.device)
        scale = (1.0 if self.loss_scale is None else self.loss_scale.scale) / len(inputs)
        for index, (ids, wanted) in enumerate(zip(inputs, targets, strict=True)):
            is_last = index == len(inputs) - 1
            with nullcontext() if is_last else self.sync.no_sync():
                with range_("forward"), autocast(self.ranks.device, self.precision):
                    loss = self.call.loss(ids, wanted)  # (rows, seq) -> scalar
                with range_("backward"):
                    (loss * scale).backward()
            total += loss.detach().float()
        return total / len(inputs)

    def update(
        self,
        loss: torch.Tensor,
        *,
        lr: float,
        stop: bool = False,
        save: bool = False,
        before_update: Callable[[], None] | None = None,
    ) -> Outcome:
        """Reduce and clip the gradients, agree with the other ranks, and step the optimizer.

        If a loss or gradient is not finite on any rank, weights and optimizer state stay untouched on all ranks.

        Args:
            stop, save: this rank was asked to stop, wants a checkpoint of this step.
            before_update: called when it is certain that the weights are about to change.
        """
        with range_("sync"):
            # Unscaling reads the gradients itself; clipping waits for the gradients that it reads.
            self.sync.finish(wait=self.loss_scale is not None)
        with range_("clip"):
            if self.loss_scale is not None:
                # The optimizer's tensors: parameters, or this rank's flat shards.
                self.loss_scale.unscale_(p for group in self.optimizer.param_groups for p in group["params"])
            norm = self.sync.clip_gradients(self._max_norm)
        bad = ~(torch.isfinite(loss) & torch.isfinite(norm))
        agreed = agree(self.ranks, stop=stop, nonfinite=bad, save=save)
        if agreed.nonfinite:
            self.optimizer.zero_grad(set_to_none=True)
            overflow = self.loss_scale is not None and self.loss_scale.shrink()
            return Outcome(
                loss, norm, applied=False, nonfinite=not overflow, stop=agreed.stop, save=agreed.save
            )
        if before_update is not None:
            before_update()
        with range_("optimizer"):
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        if self.loss_scale is not None:
            self.loss_scale.keep()
        return Outcome(loss, norm, applied=True, nonfinite=False, stop=agreed.stop, save=agreed.save)


class LossScale:
    """Scale the loss dynamically for fp16 (Micikevicius et al. 2018, "Mixed Precision Training", section 3.2).

    Gradients below 6e-8 vanish in fp16, so the loss is multiplied by a factor and the gradients are divided by it
    before anything reads them. The factor is halved when a gradient overflows (that step is skipped) and doubled
    after `GROWTH_INTERVAL` good steps. Unlike torch's GradScaler it does not decide itself, so that all ranks share
    one decision.
    """

    def __init__(self) -> None:
        self.scale = INITIAL_SCALE
        self._good_steps = 0

    def unscale_(self, parameters: Iterable[torch.Tensor]) -> None:
        """Divide the gradients by the factor."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, 1.0 / self.scale)

    def shrink(self) -> bool:
        """Halve the factor after an overflow. Return False if it is at its minimum: the overflow is real."""
        self._good_steps = 0
        if self.scale <= SMALLEST_SCALE:
            return False
        self.scale /= 2
        return True

    def keep(self) -> None:
        """Count a good step."""
        self._good_steps += 1
        if self._good_steps >= GROWTH_INTERVAL:
            self._good_steps = 0
            self.scale *= 2

    def state(self) -> LossScaleState:
        return LossScaleState(scale=self.scale, good_steps=self._good_steps)

    def restore(self, state: LossScaleState) -> None:
        self.scale, self._good_steps = state.scale, state.good_steps
