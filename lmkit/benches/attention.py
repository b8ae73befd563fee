"""`lmkit bench attention`: cases (tiers, head_dim x length grid) x variants (kernels, eager or compiled).

One road: every variant of a case first passes the gate (`attention_gate`), then has its peak memory taken, then
all that passed are timed together in interleaved rounds. What does not fit, is not supported or is wrong becomes
a row that says so.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lmkit.attention import ATTENTION, attention_function
from lmkit.benches.attention_gate import Gate, Inputs
from lmkit.benches.attention_report import COLUMNS, report_files
from lmkit.errors import UsageError
from lmkit.measure.environment import describe_environment
from lmkit.measure.limits import Limits, measure_limits
from lmkit.measure.memory import GB, available_memory, track_peak
from lmkit.measure.results import BenchResult
from lmkit.measure.timing import Timing, Work, time_variants

Progress = Callable[[str, int, int], None]

TIERS: dict[str, int] = {
    "Small": 128,
    "Medium": 256,
    "Large": 512,
    "XL": 1024,
    "XXL": 2048,
    "4k": 4096,
    "8k": 8192,
    "16k": 16384,
    "32k": 32768,
    "64k": 65536,
    "128k": 131072,
}
DEFAULT_TIERS = ("Small", "Medium", "Large", "XL", "XXL", "4k", "8k", "16k")
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SDPA_BACKENDS = {
    "sdpa:cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa:flash": SDPBackend.FLASH_ATTENTION,
    "sdpa:efficient": SDPBackend.EFFICIENT_ATTENTION,
}
FLASH_TRITON_VARIANTS: dict[str, dict[str, Any]] = {
    "flash_triton:portable": {"implementation": "portable"},
    "flash_triton:hopper": {"implementation": "hopper"},
    "flash_triton:deterministic": {"deterministic": True},
}
SDPA_REFUSALS = ("No available kernel", "No viable backend")  # of a pinned backend, on a GPU and on a CPU
COMPILED = "+compile"
CPU_KERNELS = ("reference", "vectorized", "vectorized+compile", "flash_torch", "sdpa")
GPU_KERNELS = (
    "reference",
    "vectorized",
    "vectorized+compile",
    "flash_torch",
    "flash_triton",
    "sdpa:cudnn",
    "sdpa:flash",
)
# Bytes per score that a kernel holds at once, in elements: scores, masked copy, probabilities.
SCORE_COPIES = {"reference": 3, "vectorized": 3}


@dataclass(frozen=True)
class AttentionOptions:
    """What `lmkit bench attention` measures.

    Attributes:
        tiers: names of `TIERS`, lengths ("4096") or rectangles queries:keys ("128:64").
        kernels: registry names, "sdpa:cudnn|flash|efficient", "flash_triton:portable|hopper|deterministic", each
            with an optional "+compile"; empty: what is usual on the device.
        grid_head_dims, grid_lengths: the head_dim x length sweep; either empty: none.
        backward: also forward + backward, and backward alone.
        baseline: the kernel that speed-ups are relative to.
        projection_layout: q, k, v as strided views of one (batch, seq, 3, heads, head_dim) tensor, as a model's
            projection makes them, instead of contiguous ones.
        cold_cache: overwrite the L2 cache before every sample.
        max_seconds: of timing per case and direction; whole rounds only.
    """

    device: str = "cpu"
    dtype: str = "fp32"
    batch: int = 4
    heads: int = 12
    kv_heads: int = 12
    head_dim: int = 64
    causal: bool = True
    backward: bool = False
    tiers: tuple[str, ...] = DEFAULT_TIERS
    kernels: tuple[str, ...] = ()
    grid_head_dims: tuple[int, ...] = ()
    grid_lengths: tuple[int, ...] = ()
    baseline: str = "vectorized"
    projection_layout: bool = False
    warmup: int = 10
    iters: int = 50
    cold_cache: bool = False
    max_seconds: float = 20.0
    seed: int = 0


@dataclass(frozen=True)
class Case:
    """One shape. `part` is "tiers" or "grid"; `tier` its name, such as "XXL" or "128:64"."""

    part: str
    tier: str
    num_queries: int
    num_keys: int
    head_dim: int

    def forward_flops(self, options: AttentionOptions) -> float:
        """Two matrix products, 2 FLOPs per multiply-add; causal counts the visible triangle (FlashAttention-2)."""
        area = float(self.num_queries) * self.num_keys
        if options.causal:
            square = min(self.num_queries, self.num_keys)
            area = square * square / 2.0 + max(0, self.num_queries - self.num_keys) * self.num_keys
        return 4.0 * options.batch * options.heads * area * self.head_dim


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


def build_cases(options: AttentionOptions) -> list[Case]:
    """The tiers in the order given, then the grid.

    Raises:
        UsageError: a tier that is neither a name, a length nor queries:keys.
    """
    cases = []
    for tier in options.tiers:
        num_queries, num_keys = parse_tier(tier)
        cases.append(Case("tiers", tier, num_queries, num_keys, options.head_dim))
    for head_dim in options.grid_head_dims:
        cases += [Case("grid", str(length), length, length, head_dim) for length in options.grid_lengths]
    return cases


def parse_tier(text: str) -> tuple[int, int]:
    """(num_queries, num_keys) of "XXL", "2048" or "128:64".

    Raises:
        UsageError: anything else.
    """
    if text in TIERS:
        return TIERS[text], TIERS[text]
    queries, colon, keys = text.partition(":")
    if queries.isdecimal() and int(queries) > 0 and (not colon or (keys.isdecimal() and int(keys) > 0)):
        return int(queries), int(keys if colon else queries)
    raise UsageError(
        f"bench attention: {text!r} is not a tier",
        hint=f"use {', '.join(TIERS)}, a length such as 4096, or queries:keys such as 128:64",
    )


def check_kernel_name(name: str) -> None:
    """Raises UsageError unless `build_variant` knows the name."""
    known = [*ATTENTION, *FLASH_TRITON_VARIANTS, *SDPA_BACKENDS]
    if name.removesuffix(COMPILED) not in known:
        raise UsageError(
            f"bench attention: no kernel {name!r}",
            hint=f"there are {', '.join(known)}, each with an optional {COMPILED}",
        )


def build_variant(name: str, dtype: str) -> Callable[..., Tensor]:
    """The attention function behind a variant's name ("vectorized+compile", "sdpa:cudnn").

    Args:
        dtype: a name of `DTYPES`; "tf32" has to be asked for where a kernel multiplies by itself.

    Raises:
        UsageError: the kernel needs something that is not installed.
    """
    kernel = name.removesuffix(COMPILED)
    if kernel in SDPA_BACKENDS:
        function: Callable[..., Tensor] = partial(_pinned_sdpa, SDPA_BACKENDS[kernel])
    else:
        function = attention_function(kernel.partition(":")[0])
    if kernel.startswith("flash_triton"):
        precision = {"fp32_precision": "tf32"} if dtype == "tf32" else {}
        function = partial(function, **FLASH_TRITON_VARIANTS.get(kernel, {}), **precision)
    return torch.compile(function, dynamic=False) if name.endswith(COMPILED) else function


def _pinned_sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


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
            faults = gate.faults_of(function)
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
                        "implementation": _implementation(name, inputs),
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


def _implementation(name: str, inputs: Inputs) -> str | None:
    """Which of its implementations a `flash_triton` variant took; None for kernels that have only one."""
    if not name.startswith("flash_triton"):
        return None
    from lmkit.attention.flash_triton import implementation_for

    forced = FLASH_TRITON_VARIANTS.get(name.removesuffix(COMPILED), {}).get("implementation")
    return forced or implementation_for(inputs.q, inputs.k, inputs.v, causal=inputs.causal)


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


def make_inputs(case: Case, options: AttentionOptions, *, backward: bool) -> Inputs:
    """Random normal tensors of a case; the same for the same seed and shape."""
    generator = torch.Generator(device=options.device).manual_seed(options.seed)
    dtype = DTYPES[options.dtype]

    def normal(heads: int, length: int) -> Tensor:
        if options.projection_layout:
            shape = (options.batch, length, heads, case.head_dim)
            whole = torch.randn(shape, generator=generator, device=options.device).to(dtype)
            return whole.transpose(1, 2)  # (batch, heads, length, head_dim), strided
        shape = (options.batch, heads, length, case.head_dim)
        return torch.randn(shape, generator=generator, device=options.device).to(dtype)

    return Inputs(
        q=normal(options.heads, case.num_queries),
        k=normal(options.kv_heads, case.num_keys),
        v=normal(options.kv_heads, case.num_keys),
        dout=normal(options.heads, case.num_queries) if backward else None,
        causal=options.causal,
    )


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
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if dtype == "tf32" else "ieee"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def _release_memory(device: str) -> None:
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
