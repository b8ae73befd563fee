"""Make one optimizer step: gradients of the micro-batches, agreement between ranks, update."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch

from lmkit.data.batches import Batch, BatchSource
from lmkit.measure.ranges import range_
from lmkit.model.transformer import TransformerLM
from lmkit.parallel.collectives import largest_on_any_rank
from lmkit.parallel.protocol import GradientSync
from lmkit.parallel.ranks import Ranks
from lmkit.parallel.sharded_optimizer import Zero1Optimizer
from lmkit.training.precision import GradientSums, LossScale, autocast

_FLAGS = 4
"""Flags of a report, see `Step._report`; floats follow."""
_LEAST = torch.iinfo(torch.int32).min


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


class Wishes(NamedTuple):
    """What a rank wants of a step. One rank's wish is all ranks'.

    Attributes:
        stop: the step shall be the last.
        save: a checkpoint shall be made of it.
    """

    stop: bool = False
    save: bool = False


class Outcome:
    """The result of one step. On GPUs, reading anything but `loss` waits for the step.

    Args:
        report: what `Step._report` made of it.
        ranks: those that made it.

    Attributes:
        loss: mean over this rank's rows, in nats per token; a scalar on the device.
    """

    def __init__(self, report: torch.Tensor, ranks: Ranks) -> None:
        self.loss = report[_FLAGS + ranks.rank].view(torch.float32)
        self._host, self._arrived = report, None
        if report.is_cuda:
            self._host = torch.empty_like(report, device="cpu", pin_memory=True)
            self._host.copy_(report, non_blocking=True)
            self._arrived = torch.cuda.current_stream(report.device).record_event()

    @cached_property
    def _flags(self) -> list[bool]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return [flag != 0 for flag in self._host[:_FLAGS].tolist()]

    @property
    def stop(self) -> bool:
        """Whether some rank wants to stop."""
        return self._flags[0]

    @property
    def nonfinite(self) -> bool:
        """Whether some rank saw a loss or gradient that is not finite (and loss scaling did not cause it)."""
        return self._flags[1]

    @property
    def save(self) -> bool:
        """Whether some rank wants a checkpoint of this step."""
        return self._flags[2]

    @property
    def applied(self) -> bool:
        """Whether the optimizer changed the weights."""
        return self._flags[3]

    @property
    def losses(self) -> torch.Tensor:
        """The loss of every rank: float32, (world_size,), in host memory."""
        return self._numbers[:-1]

    @property
    def grad_norm(self) -> torch.Tensor:
        """The norm of the mean gradient over all ranks, before clipping: a float32 scalar in host memory."""
        return self._numbers[-1]

    @property
    def _numbers(self) -> torch.Tensor:
        assert self._flags  # have arrived
        return self._host[_FLAGS:].view(torch.float32)


class Step:
    """Turn batches into weight updates, the same on every rank. `lmkit.training.build_step` makes one.

    The device itself decides whether an update is made: with our AdamW on a GPU, nothing in a step waits for it, and
    the host may launch further steps before it reads the `Outcome` of one.

    Args:
        model: the plain model.
        call: what `GradientSync.attach` returned for it: `call.loss(ids, targets)` is the mean loss.
        precision: how the model computes; see `lmkit.training.precision`.
        grad_clip: largest norm of the gradient; 0 does not clip.
        max_skips: after more steps in a row whose loss or gradient is not finite, no further step changes anything.
            None: every step is judged by itself.

    Attributes:
        skipped: steps in a row, up to now, whose loss or gradient was not finite; an int32 scalar on the device.

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
        max_skips: int | None = None,
    ) -> None:
        self.model = model
        self.call = call
        self.optimizer = optimizer
        self.sync = sync
        self.ranks = ranks
        self.max_skips = max_skips
        self.skipped = torch.zeros((), dtype=torch.int32, device=ranks.device)
        self._wished = Wishes()
        self._wishes = torch.zeros(2, dtype=torch.int32, device=ranks.device)
        self._max_norm = grad_clip or math.inf
        self.precision = precision
        self.loss_scale = LossScale(ranks.device) if precision == "fp16" else None

    @property
    def runs_ahead(self) -> bool:
        """Whether a step returns before its outcome is known."""
        return self.ranks.device.type == "cuda" and self._decider is not None

    @property
    def _decider(self) -> Any:
        """The optimizer that obeys its attribute `decision`; None if there is none."""
        inner = self.optimizer.inner if isinstance(self.optimizer, Zero1Optimizer) else self.optimizer
        return inner if hasattr(inner, "decision") else None

    def __call__(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        *,
        lr: float,
        ask: Callable[[], Wishes] = lambda: Wishes(),
        before_update: Callable[[], None] | None = None,
    ) -> Outcome:
        """Make one whole step: `accumulate`, then `update`.

        Args:
            inputs, targets: int64, (accumulation, rows, seq); moved to the device.
            ask, before_update: of `update`.
        """
        device = self.ranks.device
        loss = self.accumulate(inputs.to(device), targets.to(device))
        return self.update(loss, lr=lr, ask=ask, before_update=before_update)

    def accumulate(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Run forward and backward over the micro-batches; return the mean loss (a scalar on the device).

        Args:
            inputs, targets: int64, (accumulation, rows, seq), on the device.
        """
        total = torch.zeros((), device=inputs.device)
        sums = GradientSums(self.model.parameters() if len(inputs) > 2 else ())
        scale = (1.0 if self.loss_scale is None else self.loss_scale.scale) / len(inputs)
        for index, (ids, wanted) in enumerate(zip(inputs, targets, strict=True)):
            is_last = index == len(inputs) - 1
            if is_last:
                sums.give()
            with nullcontext() if is_last else self.sync.no_sync():
                with range_("forward"), autocast(self.ranks.device, self.precision):
                    loss = self.call.loss(ids, wanted)  # (rows, seq) -> scalar
                with range_("backward"):
                    (loss * scale).backward()
            if not is_last:
                sums.take()
            total += loss.detach().float()
        return total / len(inputs)

    def update(
        self,
        loss: torch.Tensor,
        *,
        lr: float,
        ask: Callable[[], Wishes] = lambda: Wishes(),
        before_update: Callable[[], None] | None = None,
    ) -> Outcome:
        """Reduce and clip the gradients, agree with the other ranks, and step the optimizer.

        If a loss or gradient is not finite on any rank, weights and optimizer state stay untouched on all ranks.

        Args:
            ask: called after the backward pass; returns what this rank wants.
            before_update: called before the weights change.
        """
        with range_("sync"):
            # Unscaling reads the gradients itself; clipping waits for the gradients that it reads.
            self.sync.finish(wait=self.loss_scale is not None)
        with range_("clip"):
            if self.loss_scale is not None:
                # The optimizer's tensors: parameters, or this rank's flat shards.
                self.loss_scale.unscale_(p for group in self.optimizer.param_groups for p in group["params"])
            norm = self.sync.clip_gradients(self._max_norm)
        self._wish(ask())
        report = self._report(loss.float(), norm.float())
        applied = report[3]
        if before_update is not None:
            before_update()
        with range_("optimizer"):
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            if self._decider is not None:
                self._decider.decision = applied
            if self._decider is not None or applied:  # the latter waits for the device
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return Outcome(report, self.ranks)

    def _wish(self, wishes: Wishes) -> None:
        """Tell the device what this rank wants."""
        if wishes != self._wished:
            for on_device, wanted in zip(self._wishes, wishes, strict=True):
                on_device.fill_(wanted)
            self._wished = wishes

    def _report(self, loss: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        """Agree with the other ranks and decide whether the update is made. The host waits for nothing.

        Returns:
            int32: stop, nonfinite, save, applied, then the bits of float32 numbers: every rank's loss, the norm.
        """
        ranks = self.ranks
        losses = torch.full((ranks.world_size,), _LEAST, dtype=torch.int32, device=loss.device)
        losses[ranks.rank] = loss.view(torch.int32)  # the largest of each is that rank's, bit for bit
        bad = ~torch.isfinite(loss + norm)
        agreed = torch.cat((self._wishes, bad.to(torch.int32)[None], losses))
        largest_on_any_rank(agreed, ranks)
        bad = agreed[2] != 0
        nonfinite = bad if self.loss_scale is None else self.loss_scale.judge(bad)
        applied = ~bad
        if self.max_skips is not None:
            is_over = self.skipped > self.max_skips
            applied &= ~is_over
            self.skipped.copy_(torch.where(is_over, self.skipped, (self.skipped + 1) * nonfinite))
        flags = torch.stack((agreed[0], nonfinite, agreed[1], applied))  # int32: the widest of them
        return torch.cat((flags, agreed[3:], norm.view(torch.int32)[None]))
