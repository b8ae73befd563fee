"""What goes into a training step besides its batch, and what comes out of it."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch

from lmkit.parallel.ranks import Ranks

APPLIED = 3
FLAGS = 4
"""Flags of a report, see `Outcome`; floats follow."""


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
        report: int32, on the device: stop, nonfinite, save, applied, then the bits of float32 numbers: every rank's
            loss, the norm of the gradient.
        ranks: those that made it.

    Attributes:
        loss: mean over this rank's rows, in nats per token; a scalar on the device.
    """

    def __init__(self, report: torch.Tensor, ranks: Ranks) -> None:
        self.loss = report[FLAGS + ranks.rank].view(torch.float32)
        self._host, self._arrived = report, None
        if report.is_cuda:
            self._host = torch.empty_like(report, device="cpu", pin_memory=True)
            self._host.copy_(report, non_blocking=True)
            self._arrived = torch.cuda.current_stream(report.device).record_event()

    @cached_property
    def _flags(self) -> list[bool]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return [flag != 0 for flag in self._host[:FLAGS].tolist()]

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
        return self._flags[APPLIED]

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
        return self._host[FLAGS:].view(torch.float32)
