"""What a warm call costs the host: ours beside an autograd Function that launches one trivial Triton kernel."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmkit.attention import attention_function
from lmkit.bench.attention_targets import BARE, OURS
from lmkit.measure.statistics import spread

CALLS = 50  # queued at once; far fewer than a stream holds, so that no call waits for the device


@triton.jit
def _store_one(pointer):
    tl.store(pointer, 1.0)


class _Bare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        _store_one[(1,)](out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class HostTime:
    """Rounds of both calls, forward with autograd recording, whenever `sample` is called.

    Hosts are slow for seconds at a time: rounds that lie far apart do not all fall into one such spell.
    """

    def __init__(self) -> None:
        q, k, v = (
            torch.randn(1, 16, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        )
        flash = attention_function("flash_triton")
        self._calls: dict[str, Callable[[], object]] = {
            OURS: lambda: flash(q, k, v, causal=True),
            BARE: lambda: _Bare.apply(q),
        }
        self._samples: dict[str, list[float]] = {name: [] for name in self._calls}
        for call in self._calls.values():
            call()  # compiles

    def sample(self) -> None:
        """One round."""
        for name, call in self._calls.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(CALLS):
                call()
            self._samples[name].append((time.perf_counter() - began) * 1e3 / CALLS)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each of the two: milliseconds of the host a call, over all rounds."""
        return [_row(name, times) for name, times in self._samples.items()]


def _row(name: str, times: list[float]) -> dict[str, Any]:
    found = spread(times)
    return {
        "set": "host time",
        "part": "tiers",
        "tier": "128",
        "num_queries": 128,
        "num_keys": 128,
        "head_dim": 64,
        "direction": "forward",
        "batch": 1,
        "heads": 16,
        "kv_heads": 16,
        "causal": True,
        "dtype": "bf16",
        "layout": "contiguous",
        "data": "normal",
        "status": "ok",
        "detail": "",
        "clock": "perf_counter",
        "kernel": name,
        "median_ms": found.median,
        "spread": found.relative,
        "samples_ms": times,
    }
