"""`lmkit bench attention`: cases (tiers, head_dim x length grid) x variants (kernels, eager or compiled).

One road: every variant of a case first passes the gate (`attention_gate`), then has its peak memory taken, then
all that passed are timed together in interleaved rounds. What does not fit, is not supported or is wrong becomes
a row that says so.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmkit.benches.attention_cases import DTYPES, AttentionOptions, Case, build_cases, make_inputs
from lmkit.benches.attention_gate import Gate, Inputs
from lmkit.benches.attention_report import COLUMNS, report_files
from lmkit.benches.attention_variants import (
    COMPILED,
    CPU_KERNELS,
    GPU_KERNELS,
    SDPA_REFUSALS,
    build_variant,
    check_kernel_name,
    implementation_of,
)
from lmkit.errors import UsageError
from lmkit.measure.environment import describe_environment
from lmkit.measure.limits import Limits, measure_limits
from lmkit.measure.memory import GB, available_memory, track_peak
from lmkit.measure.results import BenchResult
from lmkit.measure.timing import Timing, Work, time_variants

Progress = Callable[[str, int, int], None]
# Bytes per score that a kernel holds at once, in elements: scores, masked copy, probabilities.
SCORE_COPIES = {"reference": 3, "vectorized": 3}


def run_bench(options: AttentionOptions, *, progress: Progress | None = None) -> BenchResult:
    """Measure every case x variant; rows, the `attention_sweep_*` files and what they were measured on.

    Raises:
        UsageError: an unknown tier, kernel or dtype, or heads that do not fit together.
    """
    cases = build_cases(options)
    kernels = options.kernels or (GPU_KERNELS if options.device.startswith("cuda") else CPU_KERNELS)
    for name in kernels:
        check_kernel_name(name)
    if options.dtype not in DTYPES:
        raise UsageError(f"bench attention: no dtype {options.dtype!r}", hint="one of " + ", ".join(DTYPES))
    if options.heads % options.kv_heads:
        raise UsageError(
            f"bench attention: heads {options.heads} is no multiple of kv_heads {options.kv_heads}",
            hint="give every key/value head the same number of query heads",
        )
    limits = measure_limits(options.device, [options.dtype])
    environment = describe_environment() | {"limits": limits.as_dict()}
    rows: list[dict[str, Any]] = []
    for done, case in enumerate(cases):
        if progress is not None:
            progress(f"{case.part} {case.tier} head_dim {case.head_dim}", done, len(cases))
        rows += _measure_case(case, kernels, options, limits)
    if progress is not None:
        progress("cases", len(cases), len(cases))
    notes = (
        f"speedup: {options.baseline} / variant, median of paired rounds; '% peak': of the "
        f"{limits.matmul_flops[options.dtype] / 1e12:.3g} TFLOP/s {options.dtype} matmul measured here",
        "spread: (p90 - p10) / median; GB (10^9): peak on top of the inputs, output included",
    )
    files = report_files(rows, asdict(options), environment, notes)
    return BenchResult("attention", rows, COLUMNS, files, environment, notes)


def _measure_case(
    case: Case, kernels: Sequence[str], options: AttentionOptions, limits: Limits
) -> list[dict[str, Any]]:
    """All rows of one shape: forward, and with `backward` forward+backward and backward alone."""
    # Every shape is compiled anew: torch.compile would fall back to eager after 8 recompilations, silently.
    torch.compiler.reset()
    with _matmul_precision(options.dtype):
        rows = _measure_direction(case, kernels, options, limits, backward=False)
        if options.backward:
            rows += _measure_direction(case, kernels, options, limits, backward=True)
    _release_memory(options.device)
    return rows


def _measure_direction(
    case: Case,
    kernels: Sequence[str],
    options: AttentionOptions,
    limits: Limits,
    *,
    backward: bool,
) -> list[dict[str, Any]]:
    directions = ("fwd+bwd", "backward") if backward else ("forward",)
    rows = {
        (direction, name): {**asdict(case), "direction": direction, "kernel": name, **_shared_fields(options)}
        for direction in directions
        for name in kernels
    }

    def mark(name: str, status: str, detail: str) -> None:
        for direction in directions:
            rows[direction, name] |= {"status": status, "detail": detail}

    inputs = make_inputs(case, options, backward=backward)
    gate = None
    runnable: dict[str, Callable[..., Tensor]] = {}
    for name in kernels:
        too_large = _too_large_for_host(name, case, options)
        if too_large:
            mark(name, "out of memory", too_large)
            continue
        try:
            gate = gate or Gate(inputs, rounding=2.0**-9 if options.dtype == "tf32" else None)
            function = build_variant(name, options.dtype)
            rounds_scores = name.removesuffix(COMPILED) in SCORE_COPIES
            faults = gate.faults_of(function, rounds_scores=rounds_scores)
            with track_peak(options.device) as peak:
                _call(function, inputs, backward)
        except torch.OutOfMemoryError as error:
            mark(name, "out of memory", str(error).split(". ")[0])
            _release_memory(options.device)
        except (UsageError, ValueError, NotImplementedError) as error:
            mark(name, "unsupported", str(error))
        except torch.AcceleratorError:
            raise  # the device is lost for this process: nothing after it could be trusted
        except RuntimeError as error:
            refused = any(words in str(error) for words in SDPA_REFUSALS)
            mark(name, "unsupported" if refused else "failed", str(error).splitlines()[0])
        else:
            mark(name, "wrong result" if faults else "ok", "; ".join(faults))
            if not faults:
                runnable[name] = function
                for direction in directions:
                    rows[direction, name] |= {
                        "peak_gb": peak.extra_bytes / GB,
                        "implementation": implementation_of(name, inputs),
                    }
    gate = None  # its tensors are not part of what is measured
    _release_memory(options.device)
    for direction in directions if runnable else ():
        timings = _time(runnable, inputs, options, direction)
        flops = case.forward_flops(options) * {"forward": 1.0, "backward": 2.5, "fwd+bwd": 3.5}[direction]
        for name, timing in timings.items():
            rows[direction, name] |= _time_fields(name, timings, timing, flops, options, limits)
    return list(rows.values())


def _time(
    runnable: dict[str, Callable[..., Tensor]], inputs: Inputs, options: AttentionOptions, direction: str
) -> dict[str, Timing]:
    calls: dict[str, Work] = {}
    prepare: dict[str, Work] = {}
    for name, function in runnable.items():
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
        min_sample_ms=0.5,
        max_seconds=options.max_seconds,
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
        outputs.append(function(*leaves, causal=inputs.causal))

    def backward() -> object:
        return torch.autograd.grad(outputs.pop(), leaves, inputs.dout)

    return forward, backward


def _shared_fields(options: AttentionOptions) -> dict[str, Any]:
    return {
        "batch": options.batch,
        "heads": options.heads,
        "kv_heads": options.kv_heads,
        "causal": options.causal,
        "dtype": options.dtype,
        "layout": "projection" if options.projection_layout else "contiguous",
    }


def _time_fields(
    name: str,
    timings: dict[str, Timing],
    timing: Timing,
    flops: float,
    options: AttentionOptions,
    limits: Limits,
) -> dict[str, Any]:
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
        "share_of_matmul": rate / limits.matmul_flops[options.dtype],
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
    }


def _too_large_for_host(name: str, case: Case, options: AttentionOptions) -> str:
    """On a CPU nothing raises: Linux kills the process instead. So ask first, for kernels that hold all scores."""
    copies = SCORE_COPIES.get(name.removesuffix(COMPILED))
    free = available_memory() if not options.device.startswith("cuda") else None
    if copies is None or free is None:
        return ""
    scores = options.batch * options.heads * case.num_queries * case.num_keys * DTYPES[options.dtype].itemsize
    return (
        f"needs {copies * scores / GB:.1f} GB, {free / GB:.1f} GB free"
        if copies * scores > 0.8 * free
        else ""
    )


@contextmanager
def _matmul_precision(dtype: str) -> Iterator[None]:
    # Not `matmul.fp32_precision`: torch refuses to compile where that and the older switch disagree.
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _release_memory(device: str) -> None:
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
