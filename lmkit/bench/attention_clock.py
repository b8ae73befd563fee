"""The timing of the attention bench: what a call is in each direction, and the fields that a timing gives a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmkit.bench.attention_cases import AttentionOptions
from lmkit.bench.attention_gate import Inputs
from lmkit.bench.attention_variants import precision_of
from lmkit.measure.limits import Limits
from lmkit.measure.timing import Timing, Work, time_variants


def time_functions(
    functions: Mapping[str, Callable[..., Tensor]], inputs: Inputs, options: AttentionOptions, direction: str
) -> dict[str, Timing]:
    """Times "forward", "fwd+bwd" or "backward" of every function, interleaved."""
    calls: dict[str, Work] = {}
    prepare: dict[str, Work] = {}
    for name, function in functions.items():
        if direction == "backward":
            prepare[name], calls[name] = _split_backward(function, inputs)
        else:
            calls[name] = partial(_call, function, inputs, direction == "fwd+bwd")
    return time_variants(
        calls,
        prepare=prepare,
        device=options.device,
        repeats=options.iters,
        warmup=options.warmup,
        cold_cache=options.cold_cache,
        min_sample_ms=0.2,  # 400 times what CUDA events resolve
        max_seconds=options.max_seconds,
        share_seconds=True,
        seed=options.seed,
    )


def _call(function: Callable[..., Tensor], inputs: Inputs, backward: bool) -> object:
    if not backward:
        with torch.no_grad():
            return function(inputs.q, inputs.k, inputs.v, causal=inputs.causal)
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    return torch.autograd.grad(function(*leaves, causal=inputs.causal), leaves, inputs.dout)


def _split_backward(function: Callable[..., Tensor], inputs: Inputs) -> tuple[Work, Work]:
    """(forward that keeps its graph, backward that consumes it): the graph is built anew for every sample."""
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    outputs: list[Tensor] = []

    def forward() -> None:
        outputs.clear()  # a sample that was taken again left one
        outputs.append(function(*leaves, causal=inputs.causal))

    def backward() -> object:
        return torch.autograd.grad(outputs.pop(), leaves, inputs.dout)

    return forward, backward


def time_fields(
    name: str, timings: Mapping[str, Timing], flops: float, options: AttentionOptions, limits: Limits
) -> dict[str, Any]:
    """Times, rates and ratios of one variant among those that were timed with it.

    Args:
        flops: of one call.
    """
    timing = timings[name]
    spread = timing.spread
    rate = flops / (spread.median * 1e-3)
    fields: dict[str, Any] = {
        "median_ms": spread.median,
        "mean_ms": spread.mean,
        "p10_ms": spread.p10,
        "p90_ms": spread.p90,
        "spread": spread.relative,
        "repeats": spread.count,
        "tflops": rate / 1e12,
        "share_of_matmul": rate / limits.matmul_flops[precision_of(name, options.dtype)],
    }
    if options.baseline in timings:
        ratio = timing.versus(timings[options.baseline])
        fields |= {
            "speedup": ratio.speedup,
            "speedup_low": ratio.low,
            "speedup_high": ratio.high,
            "verdict": ratio.verdict,
        }
    rivals = {rival: other for rival, other in timings.items() if rival.split(":")[0] == "sdpa"}
    if rivals and name not in rivals:
        best = min(rivals, key=lambda rival: rivals[rival].median_ms)
        ratio = timing.versus(rivals[best])
        fields |= {
            "best_sdpa": best,
            "versus_sdpa": ratio.speedup,
            "versus_sdpa_low": ratio.low,
            "versus_sdpa_high": ratio.high,
            "versus_sdpa_verdict": ratio.verdict,
        }
    return fields | {
        "clock": timing.clock,
        "cache": timing.cache,
        "calls_per_sample": timing.calls_per_sample,
        "samples_ms": list(timing.samples_ms),
        "sample_rounds": list(timing.rounds),
    }
