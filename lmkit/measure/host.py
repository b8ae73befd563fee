"""Measure how fast a host launches kernels, relative to the host that plans were fitted to."""

from __future__ import annotations

import time
from typing import Any

import torch

CALLS = 50
MEASURED_S = 0.5
"""Long enough for an average: calls may take twice as long for a tenth of a second."""
REFERENCE_S = 19e-6
"""Seconds of a call on the host of the H200s to which `lmkit.model.accounting.host_seconds` was fitted."""
EXPONENT = 0.55
"""A step takes this power of the time of a call, because it also waits for the GPU and for other ranks. Fitted: where
calls took 1.9 times as long, steps took 1.4 times as long."""


class _Doubled(torch.autograd.Function):
    """An operation with the Python of a fused one, and next to nothing to compute."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (_,) = ctx.saved_tensors
        return grad * 2


def host_pace() -> float:
    """Return the time that this host takes to launch a step over that of the reference, estimated from tiny calls."""
    return float((call_seconds() / REFERENCE_S) ** EXPONENT)


def call_seconds() -> float:
    """Return the mean seconds of a tiny operation, forward and backward."""
    calls, started = 0, time.perf_counter()
    while time.perf_counter() - started < MEASURED_S:
        x = torch.ones(4, requires_grad=True)
        for _ in range(CALLS):
            x = _Doubled.apply(x)
        x.sum().backward()
        calls += CALLS
    return (time.perf_counter() - started) / calls
