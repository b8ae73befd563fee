"""Measure how fast a host launches kernels, relative to the one that plans were fitted on."""

from __future__ import annotations

import time
from typing import Any

import torch

CALLS = 50
MEASURED_S = 0.5
"""Long enough to see how busy the host is on average: it may take twice as long for a tenth of a second."""
REFERENCE_S = 19e-6
"""Seconds of a call on the host of the H200s to which `lmkit.model.accounting.host_seconds` was fitted."""
EXPONENT = 0.55
"""When calls took 1.9 times as long there, steps took 1.4 times as long: they also wait for GPUs and other ranks."""


class _Doubled(torch.autograd.Function):
    """As much Python as a fused operation has around its kernel, and next to nothing to compute."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (_,) = ctx.saved_tensors
        return grad * 2


def host_pace() -> float:
    """Return how many times as long as the reference this host takes to launch a step, by the calls of a tiny one."""
    return float((call_seconds() / REFERENCE_S) ** EXPONENT)


def call_seconds() -> float:
    """Return the mean seconds of both passes of a tiny operation."""
    calls, started = 0, 0.0
    while not calls or time.perf_counter() - started < MEASURED_S:
        started = started or time.perf_counter()
        x = torch.ones(4, requires_grad=True)
        for _ in range(CALLS):
            x = _Doubled.apply(x)
        x.sum().backward()
        calls += CALLS
    return (time.perf_counter() - started) / calls
