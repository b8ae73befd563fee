"""`lmkit bench attention`: cases (tiers, head_dim x length grid) x variants (kernels, eager or compiled).

Every variant is checked (`attention_gate`) before it is timed. Variants of a case are timed in interleaved rounds;
what does not fit, is not supported, or gives wrong results becomes a row that says so.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, model_validator

from lmkit.bench.harness import (
    Context,
    FlagNames,
    not_enough_memory,
    out_of_memory_is_a_row,
    ratio_fields,
    time_fields,
    time_what_fits,
)
from lmkit.bench.report import Summary, failures, grouped, pivot
from lmkit.errors import UsageError, did_you_mean
from lmkit.measure.limits import Limits
from lmkit.measure.memory import GB, available_memory, release_memory, track_peak
from lmkit.measure.plots import grouped_bars, heat_map, line_plot, of_time
from lmkit.measure.tables import Column, Rows, markdown_table
from lmkit.measure.timing import Timing, Work, time_variants
from lmkit.recipe.tables import AttentionVariant, Count, PositiveFloat, PositiveInt, Table
from lmkit.registry import ATTENTION, BENCHES

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lmkit.bench.attention_gate import Gate, Inputs

log = logging.getLogger("lmkit")
TIERS: dict[str, int] = {
    "Small": 128,
    "Medium": 256,
    "Large": 512,
    "XL": 1024,
    "XXL": 2048,
    **{f"{thousands}k": thousands * 1024 for thousands in (4, 8, 16, 32, 64, 128)},
}
SDPA_BACKENDS = {
    "sdpa:cudnn": "CUDNN_ATTENTION",
    "sdpa:flash": "FLASH_ATTENTION",
    "sdpa:efficient": "EFFICIENT_ATTENTION",
}
SDPA_REFUSALS = ("No available kernel", "No viable backend")  # of a pinned backend, on a GPU and on a CPU
COMPILED = "+compile"
SCORE_COPIES = 3  # scores, masked copy, probabilities: what a kernel that keeps scores holds at once
MEMORY_STEP = 1024  # tokens; how finely the longest sequence that fits is searched
FLOPS = {"forward": 1.0, "backward": 2.5, "fwd+bwd": 3.5}  # five matrix products where forward has two


def parse_tier(text: str) -> tuple[int, int]:
    """Return (num_queries, num_keys) of "XXL", "2048" or "128:64".

    Raises:
        ValueError: anything else.
    """
    if text in TIERS:
        return TIERS[text], TIERS[text]
    queries, colon, keys = text.partition(":")
    if queries.isdecimal() and int(queries) > 0 and (not colon or (keys.isdecimal() and int(keys) > 0)):
        return int(queries), int(keys if colon else queries)
    raise ValueError(
        f'"{text}" is not a tier; use {", ".join(TIERS)}, a length, or queries:keys such as 128:64'
    )


def _is_tier(text: str) -> str:
    parse_tier(text)
    return text


Tier = Annotated[str, AfterValidator(_is_tier)]
CUSTOM_TIERS = FlagNames(("--custom-tiers", "--custom_tiers"))


class Options(Table):
    """`[bench.attention]`."""

    suite: Literal["sweep", "acceptance"] = "sweep"
    """Ignored. The acceptance suite is a test now: nox -s acceptance."""
    dtype: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """Dtype of q, k and v; tf32: fp32 inputs, multiplied in tf32."""
    batch: PositiveInt = 4
    """Sequences."""
    heads: PositiveInt = 12
    """Heads of the queries."""
    kv_heads: PositiveInt = 12
    """Heads of keys and values; fewer than heads: grouped-query attention."""
    head_dim: PositiveInt = 64
    """Dimensions of a head, in the tiers."""
    causal: bool = True
    """Query i sees keys j <= i; false: all keys."""
    backward: bool = False
    """Also time forward + backward, and backward alone."""
    tiers: Annotated[tuple[Tier, ...], CUSTOM_TIERS] = ("Small", "Medium", "Large", "XL")
    """Names (Small 128 ... XXL 2048, 4k ... 128k), lengths, or rectangles queries:keys."""
    kernels: tuple[AttentionVariant, ...] = ()
    """Kernels that `lmkit env` lists, KERNEL:VARIANT such as flash_triton:deterministic, sdpa:cudnn|flash|efficient,
    each with an optional `+compile`; empty: all that run on the device."""
    grid_head_dims: tuple[PositiveInt, ...] = ()
    """Head sizes of the head_dim x length sweep, forward only; empty: no sweep."""
    grid_lengths: tuple[PositiveInt, ...] = ()
    """Lengths of the head_dim x length sweep; empty: no sweep."""
    grid_kernels: tuple[AttentionVariant, ...] = ()
    """Kernels of the sweep; empty: the baseline, ours and PyTorch's."""
    baseline: AttentionVariant = "vectorized"
    """The kernel that speedups are relative to."""
    projection_layout: bool = False
    """q, k and v as strided views of one tensor, as a model's projection makes them."""
    data: Literal["normal", "logits x 8", "sink", "late sink", "ramp up", "ramp down"] = "normal"
    """Random numbers, or scores as trained models have them: large, one dominant key, growing or falling maxima."""
    warmup: Count = 10
    """Untimed calls before the first sample."""
    iters: PositiveInt = 50
    """Timed calls, at most."""
    cold_cache: bool = False
    """Overwrite the L2 cache before every sample."""
    max_seconds: PositiveFloat = 2.0
    """Seconds of timing per case and direction, shared by the kernels."""
    longest_call_seconds: PositiveFloat = 0.5
    """A kernel that a shorter case shows to need longer than this for one call is skipped."""

    @model_validator(mode="after")
    def _groups_are_whole(self) -> Options:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not divisible by kv_heads {self.kv_heads}")
        return self

    def shared_fields(self) -> dict[str, Any]:
        """Return the fields that all rows have."""
        return {
            "batch": self.batch,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "causal": self.causal,
            "dtype": self.dtype,
            "layout": "projection" if self.projection_layout else "contiguous",
            "data": self.data,
        }


@dataclass(frozen=True)
class Case:
    """One shape. `part` is "tiers", "grid" or "memory limit"; `tier` its name, such as "XXL" or "128:64"."""

    part: str
    tier: str
    num_queries: int
    num_keys: int
    head_dim: int

    def flops(self, options: Options, direction: str) -> float:
        """Return 2 FLOPs per multiply-add; causal counts the visible triangle (FlashAttention-2)."""
        area = float(self.num_queries) * self.num_keys
        if options.causal:
            square = min(self.num_queries, self.num_keys)
            area = square * square / 2.0 + max(0, self.num_queries - self.num_keys) * self.num_keys
        return FLOPS[direction] * 4.0 * options.batch * options.heads * area * self.head_dim


def build_cases(options: Options) -> list[Case]:
    """Return the tiers in the order given, then the grid."""
    cases = [Case("tiers", tier, *parse_tier(tier), options.head_dim) for tier in options.tiers]
    for head_dim in options.grid_head_dims:
        cases += [Case("grid", str(length), length, length, head_dim) for length in options.grid_lengths]
    return cases


@BENCHES.register(
    "attention",
    order=1,
    help="Attention kernels over lengths: checked, then timed.",
    recipes=("bench_attention", "bench_attention_cpu"),
    stem="attention_sweep",
    example="lmkit bench attention bench_attention --tiers 128:64,XXL --backward",
    row_keys=("kernel", "direction", "num_queries", "num_keys"),
)
def attention(context: Context) -> Rows:
    """Return a row per case, variant and direction, and the longest sequences that fit.

    Raises:
        UsageError: an unknown kernel.
    """
    options: Options = context.options
    if options.suite == "acceptance":
        log.warning("bench.attention.suite: the targets are tests now (nox -s acceptance); this is the sweep")
    on_gpu = context.device.type == "cuda"
    kernels = options.kernels or default_kernels(on_gpu=on_gpu)
    rivals = ("flash_triton", "sdpa:cudnn") if on_gpu else ("flash_torch", "sdpa")
    grid_kernels = options.grid_kernels or tuple(dict.fromkeys((options.baseline, *rivals)))
    for name in (*kernels, *grid_kernels):
        check_kernel(name)
    limits = context.limits([precision_of(name, options.dtype) for name in (*kernels, *grid_kernels)])
    sweep = Sweep(options, limits, device=context.device, seed=context.recipe.run.seed)
    cases = build_cases(options)
    rows: Rows = []
    for done, case in enumerate(cases):
        context.progress("attention", done, len(cases))
        found = sweep.measure(case, grid_kernels if case.part == "grid" else kernels)
        rows += found
        context.keep(found)
    rows += sweep.longest_that_fit(rows)
    context.progress("attention", len(cases), len(cases))
    return rows


# Variants


def default_kernels(*, on_gpu: bool) -> tuple[str, ...]:
    """Return what is measured by default: every kernel that runs on the device."""
    found: list[str] = []
    for name in ATTENTION.names:
        facts = ATTENTION.facts(name)
        installed = all(importlib.util.find_spec(package) for package in facts.requires)
        if installed and ("cuda" if on_gpu else "cpu") in facts.devices:
            found += ["sdpa:cudnn", "sdpa:flash"] if name == "sdpa" and on_gpu else [name]
            found += [name + COMPILED] if name == "vectorized" else []
    return tuple(found)


def check_kernel(name: str) -> None:
    """Raise UsageError unless `build_variant` knows the name."""
    known = [*ATTENTION.names, *SDPA_BACKENDS]
    known += [
        f"{kernel}:{variant}" for kernel in ATTENTION.names for variant in ATTENTION.facts(kernel).variants
    ]
    plain = name.removesuffix(COMPILED)
    if plain not in known:
        raise UsageError(
            "bench.unknown_kernel",
            f"bench.attention.kernels: there is no {name!r}{did_you_mean(plain, known)}",
            hint=f"there are {', '.join(known)}, each with an optional {COMPILED}",
        )


def _variant(name: str) -> tuple[str, Mapping[str, Any]]:
    """Return the kernel and the arguments that a name such as "flash_triton:tf32+compile" stands for."""
    kernel, _, variant = name.removesuffix(COMPILED).partition(":")
    return kernel, ATTENTION.facts(kernel).variants.get(variant, {})


def build_variant(name: str, dtype: str) -> Callable[..., Tensor]:
    """Return the attention function of a variant such as "vectorized+compile" or "sdpa:cudnn".

    Args:
        dtype: "tf32" has to be asked for where a kernel multiplies by itself.

    Raises:
        UsageError: the kernel needs a package that is not installed.
    """
    import torch

    from lmkit.attention import attention_function

    plain = name.removesuffix(COMPILED)
    kernel, arguments = _variant(name)
    if plain in SDPA_BACKENDS:
        function: Callable[..., Tensor] = partial(_pinned_sdpa, SDPA_BACKENDS[plain])
    else:
        tf32 = ATTENTION.facts(kernel).variants.get("tf32", {}) if dtype == "tf32" else {}
        arguments = {**tf32, **arguments}
        function = (
            partial(attention_function(kernel), **arguments) if arguments else attention_function(kernel)
        )
    return torch.compile(function, dynamic=False) if name.endswith(COMPILED) else function


def _pinned_sdpa(backend: str, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    with sdpa_kernel(getattr(SDPBackend, backend)):
        return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def precision_of(name: str, dtype: str) -> str:
    """Return the label of a row: the bench's dtype, or tf32 for a variant that multiplies float32 so."""
    return "tf32" if dtype == "fp32" and name.removesuffix(COMPILED).endswith(":tf32") else dtype


def implementation_of(name: str, inputs: Inputs) -> str | None:
    """Return which of its implementations a kernel runs; None for kernels that have only one."""
    kernel, arguments = _variant(name)
    function = ATTENTION.facts(kernel).implementation
    if function is None:
        return None
    forced: str | None = arguments.get("implementation")
    return forced or ATTENTION.function_of(kernel, function)(inputs.q, inputs.k, inputs.v)


# Measuring


class Sweep:
    """What the cases of one run share: options, limits, which kernels were checked in full, how long calls took."""

    def __init__(self, options: Options, limits: Limits, *, device: torch.device, seed: int) -> None:
        self._options = options
        self._limits = limits
        self._device = device
        self._seed = seed
        self._checked: dict[tuple[str, int, bool], list[str]] = {}  # (kernel, head_dim, backward) -> faults
        self._calls: dict[tuple[str, int, str], tuple[float, float]] = {}  # last (FLOPs, ms) measured

    def measure(
        self,
        case: Case,
        kernels: Sequence[str],
        gradients: Sequence[str] = ("fwd+bwd", "backward"),
        backward_only: Sequence[str] = (),
    ) -> Rows:
        """Return all rows of one shape: forward, and with the option `backward` those of `gradients`.

        The grid is forward only: its picture shows nothing else.

        Args:
            backward_only: further kernels, whose forward pass is that of another.
        """
        import torch

        # Every shape is compiled anew: torch.compile would fall back to eager after 8 recompilations, silently.
        torch.compiler.reset()
        with _matmul_precision(self._options.dtype):
            rows = self._measure_directions(case, kernels, ("forward",))
            if self._options.backward and case.part != "grid":
                too_large = {row["kernel"] for row in rows if row["status"] == "out of memory"}
                rows += self._measure_directions(case, (*kernels, *backward_only), gradients, too_large)
        release_memory(self._device)
        return rows

    def _measure_directions(
        self, case: Case, kernels: Sequence[str], directions: Sequence[str], too_large: Collection[str] = ()
    ) -> Rows:
        """Return rows of directions that share their inputs.

        Args:
            too_large: kernels whose forward pass did not fit.
        """
        options, backward = self._options, "forward" not in directions
        shared = {"precision": "", **options.shared_fields()}
        found: dict[str, dict[str, Any]] = {name: {"status": "ok", "detail": ""} for name in kernels}
        inputs_row: dict[str, Any] = {"status": "ok"}
        runnable: dict[str, Callable[..., Tensor]] = {}
        inputs = gate = None
        with out_of_memory_is_a_row(inputs_row, self._device):
            inputs = self._inputs(case, backward=backward)
        for name in kernels:
            if inputs is None:
                found[name] |= inputs_row | {"detail": f"inputs: {inputs_row['detail']}"}
                continue
            refusal = self._refusal(name, case, directions[0])
            if name in too_large:
                refusal = not_enough_memory("the forward pass alone does not fit")
            if refusal is not None:
                found[name] |= refusal
                continue
            with out_of_memory_is_a_row(found[name], self._device), _refusal_is_a_row(found[name]):
                gate = gate or self._gate(inputs)
                function = build_variant(name, options.dtype)
                found[name] |= self._check_and_weigh(name, function, gate, case, backward)
                if found[name]["status"] == "ok":
                    runnable[name] = function
        gate = None  # its tensors would take memory from what is measured
        rows: Rows = []
        for direction in directions:
            of_direction = {
                name: {
                    **asdict(case),
                    "direction": direction,
                    "kernel": name,
                    **shared,
                    "precision": precision_of(name, options.dtype),
                    **found[name],
                }
                for name in kernels
            }
            if inputs is not None:
                self._time(runnable, inputs, case, direction, of_direction)
            rows += of_direction.values()
        return rows

    def _inputs(self, case: Case, *, backward: bool) -> Inputs:
        from lmkit.bench.attention_gate import make_inputs

        shape = (case.num_queries, case.num_keys, case.head_dim)
        return make_inputs(self._options, *shape, device=self._device, seed=self._seed, backward=backward)

    def _gate(self, inputs: Inputs) -> Gate:
        from lmkit.bench.attention_gate import Gate

        return Gate(inputs)

    def _check_and_weigh(
        self, name: str, function: Callable[..., Tensor], gate: Gate, case: Case, backward: bool
    ) -> dict[str, Any]:
        """Return status, errors, time of the first call and peak memory of a variant."""
        from lmkit.bench.attention_gate import arithmetic_of

        kernel, _ = _variant(name)
        keeps_scores = ATTENTION.facts(kernel).keeps_scores
        arithmetic = arithmetic_of(precision_of(name, self._options.dtype), keeps_scores=keeps_scores)
        faults, first_call = self._faults_when_short(name, function, case, backward, arithmetic)
        probed, seconds = self._timed_run(function, gate.probe)
        faults += gate.faults_at_spots(probed, arithmetic)
        fields: dict[str, Any] = {f"error_{tensor}": error for tensor, error in gate.errors(probed).items()}
        del probed
        with track_peak(self._device) as peak:
            results = gate.inputs.run(function)
        faults += gate.faults_against_pytorch(results, arithmetic)
        return fields | {
            "status": "wrong result" if faults else "ok",
            "detail": "; ".join(faults),
            "peak_gb": peak.extra_bytes / GB,
            "first_call_s": first_call + seconds,
            "implementation": implementation_of(name, gate.inputs),
        }

    def _faults_when_short(
        self, name: str, function: Callable[..., Tensor], case: Case, backward: bool, arithmetic: Any
    ) -> tuple[list[str], float]:
        """Check every row of a shorter case against float64, once per kernel and head_dim; also return its seconds.

        Not for compiled variants: another shape would be another compilation.
        """
        from lmkit.bench.attention_gate import FULL_CHECK_LENGTH

        key = (name, case.head_dim, backward)
        if name.endswith(COMPILED):
            return [], 0.0
        if max(case.num_queries, case.num_keys) <= FULL_CHECK_LENGTH:
            self._checked[key] = []  # the gate of this case looks at every row
        if key in self._checked:
            return list(self._checked[key]), 0.0
        queries, keys = (min(length, FULL_CHECK_LENGTH) for length in (case.num_queries, case.num_keys))
        short = self._inputs(replace(case, num_queries=queries, num_keys=keys), backward=backward)
        gate = self._gate(short)
        probed, seconds = self._timed_run(function, gate.probe)
        self._checked[key] = [
            f"at {queries}:{keys}, {fault}" for fault in gate.faults_at_spots(probed, arithmetic)
        ]
        return list(self._checked[key]), seconds

    def _timed_run(self, function: Callable[..., Tensor], inputs: Inputs) -> tuple[tuple[Tensor, ...], float]:
        import torch

        began = time.perf_counter()
        results = inputs.run(function)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return results, time.perf_counter() - began

    def _refusal(self, name: str, case: Case, direction: str) -> dict[str, Any] | None:
        """Return status and detail of a variant that is not even tried; None: try it."""
        options = self._options
        flops_before, ms_before = self._calls.get((name, case.head_dim, direction), (0.0, 0.0))
        if flops_before:
            seconds = ms_before * 1e-3 * case.flops(options, direction) / flops_before
            limit = options.longest_call_seconds
            if seconds > max(limit, ms_before * 1e-3):
                return {
                    "status": "skipped",
                    "detail": f"about {seconds:.2g} s a call, longest_call_seconds is {limit:g}",
                }
        # On a CPU nothing raises: Linux kills the process instead. So kernels that hold all scores are added up
        # first.
        free = None if self._device.type == "cuda" else available_memory()
        if free is None or not ATTENTION.facts(_variant(name)[0]).keeps_scores:
            return None
        itemsize = 2 if options.dtype in ("bf16", "fp16") else 4
        needed = SCORE_COPIES * options.batch * options.heads * case.num_queries * case.num_keys * itemsize
        if needed <= 0.8 * free:
            return None
        return not_enough_memory(f"needs {needed / GB:.1f} GB, {free / GB:.1f} GB free")

    def _time(
        self,
        functions: dict[str, Callable[..., Tensor]],
        inputs: Inputs,
        case: Case,
        direction: str,
        rows: dict[str, dict[str, Any]],
    ) -> None:
        options = self._options

        def time_together(left: dict[str, Any]) -> dict[str, Timing]:
            calls: dict[str, Work] = {}
            prepare: dict[str, Work] = {}
            for name, function in left.items():
                if direction == "backward":
                    prepare[name], calls[name] = _split_backward(function, inputs)
                else:
                    calls[name] = partial(_call, function, inputs, direction == "fwd+bwd")
            return time_variants(
                calls,
                prepare=prepare,
                device=self._device,
                repeats=options.iters,
                warmup=options.warmup,
                cold_cache=options.cold_cache,
                min_sample_ms=0.2,  # 400 times what CUDA events resolve
                max_seconds=options.max_seconds,
                share_seconds=True,
                seed=self._seed,
            )

        timings = time_what_fits(functions, rows, self._device, time_together)
        flops = case.flops(options, direction)
        for name, timing in timings.items():
            rows[name] |= self._time_fields(name, timings, flops)
            # The fastest sample: what a busy moment does to a sample says nothing about the next length.
            self._calls[name, case.head_dim, direction] = (flops, min(timing.samples_ms))

    def _time_fields(self, name: str, timings: Mapping[str, Timing], flops: float) -> dict[str, Any]:
        """Return times, rates and ratios of one variant among those that were timed with it."""
        timing, options = timings[name], self._options
        fields = time_fields(timing.samples_ms)
        rate = flops / (fields["median_ms"] * 1e-3)
        fields |= {
            "repeats": len(timing.samples_ms),
            "tflops": rate / 1e12,
            "share_of_matmul": rate / self._limits.matmul_flops[precision_of(name, options.dtype)],
        }
        if options.baseline in timings:
            fields |= ratio_fields(timing.versus(timings[options.baseline]))
        rivals = {rival: other for rival, other in timings.items() if rival.split(":")[0] == "sdpa"}
        if rivals and name not in rivals:
            best = min(rivals, key=lambda rival: rivals[rival].median_ms)
            fields["best_sdpa"] = best
            fields |= ratio_fields(timing.versus(rivals[best]), "versus_sdpa", "versus_sdpa_verdict")
        fields |= {"clock": timing.clock, "cache": timing.cache, "calls_per_sample": timing.calls_per_sample}
        return fields | {"sample_rounds": list(timing.rounds)}

    def longest_that_fit(self, rows: Rows) -> Rows:
        """Return, for each kernel that ran out of GPU memory in a square tier, the longest forward pass that fits."""
        if self._device.type != "cuda":
            return []
        found: Rows = []
        tiers = [row for row in _square(rows) if row["part"] == "tiers" and row["direction"] == "forward"]
        for name, mine in grouped(tiers, lambda row: str(row["kernel"])).items():
            too_long = min((row["num_keys"] for row in mine if row["status"] == "out of memory"), default=0)
            fits = max((row["num_keys"] for row in mine if row["status"] == "ok"), default=0)
            if fits and too_long and not name.endswith(COMPILED):
                found.append(self._longest_between(name, fits, too_long))
        return found

    def _longest_between(self, name: str, fits: int, too_long: int) -> dict[str, Any]:
        options = self._options
        function = build_variant(name, options.dtype)
        peak_gb = None
        while too_long - fits > MEMORY_STEP:
            length = (fits + too_long) // 2 // MEMORY_STEP * MEMORY_STEP
            trial: dict[str, Any] = {"status": "ok"}
            with out_of_memory_is_a_row(trial, self._device):
                inputs = self._inputs(Case("", "", length, length, options.head_dim), backward=False)
                with track_peak(self._device) as peak:
                    inputs.run(function)
                fits, peak_gb = length, peak.extra_bytes / GB
            if trial["status"] != "ok":
                too_long = length
            inputs = None  # type: ignore[assignment]
            release_memory(self._device)
        return {
            **asdict(Case("memory limit", str(fits), fits, fits, options.head_dim)),
            "direction": "forward",
            "kernel": name,
            **options.shared_fields(),
            "precision": precision_of(name, options.dtype),
            "status": "longest that fits",
            "detail": f"{too_long} tokens do not",
            "peak_gb": peak_gb,
        }


@contextmanager
def _refusal_is_a_row(row: dict[str, Any]) -> Iterator[None]:
    """Turn what a kernel does not support, or fails with, into the row's status; out of memory passes."""
    import torch

    from lmkit.measure.memory import is_out_of_memory

    try:
        yield
    except (UsageError, ValueError, NotImplementedError) as error:
        row |= {"status": "unsupported", "detail": str(error)}
    except RuntimeError as error:
        # A lost device fails everything that follows: nothing after it could be trusted.
        if is_out_of_memory(error) or isinstance(error, torch.AcceleratorError):
            raise
        refused = any(words in str(error) for words in SDPA_REFUSALS)
        row |= {"status": "unsupported" if refused else "failed", "detail": str(error).splitlines()[0]}


@contextmanager
def _matmul_precision(dtype: str) -> Iterator[None]:
    import torch

    # Not `matmul.fp32_precision`: torch refuses to compile where that and the older switch disagree.
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _call(function: Callable[..., Tensor], inputs: Inputs, backward: bool) -> object:
    import torch

    if not backward:
        with torch.no_grad():
            return function(inputs.q, inputs.k, inputs.v, causal=inputs.causal)
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    return torch.autograd.grad(function(*leaves, causal=inputs.causal), leaves, inputs.dout)


def _split_backward(function: Callable[..., Tensor], inputs: Inputs) -> tuple[Work, Work]:
    """Return (forward that keeps its graph, backward that consumes it); each sample builds its graph anew."""
    import torch

    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    outputs: list[Tensor] = []

    def forward() -> None:
        outputs.clear()  # a sample that was taken again left one
        outputs.append(function(*leaves, causal=inputs.causal))

    def backward() -> object:
        return torch.autograd.grad(outputs.pop(), leaves, inputs.dout)

    return forward, backward


# Rows in words

COLUMNS = (
    Column("tier", "tier"),
    Column("head_dim", "D", "d"),
    Column("direction", "direction"),
    Column("kernel", "kernel"),
    Column("median_ms", "ms", ".4g", instead="status"),
    Column("spread", "spread", ".0%"),
    Column("tflops", "TFLOP/s", ".3g"),
    Column("share_of_matmul", "% peak", ".1%"),
    Column("peak_gb", "GB", ".3g"),
    Column("speedup", "speedup", ".2f"),
)
VERDICT_COLUMNS = (
    Column("tier", "tier"),
    Column("kernel", "kernel"),
    Column("direction", "direction"),
    Column("versus_sdpa", "times as fast", ".3f"),
    Column("versus_sdpa_low", "95% from", ".3f"),
    Column("versus_sdpa_high", "to", ".3f"),
    Column("best_sdpa", "as"),
    Column("versus_sdpa_verdict", "verdict"),
)
SHORT_STATUS = {"out of memory": "OOM", "wrong result": "wrong", "skipped": "too slow"}


def summarize(rows: Rows) -> Summary:
    """Say what the rows support: the fastest, against PyTorch, speedups, where memory ends."""
    shown = [row for row in rows if row.get("part") != "grid"]  # a picture, and a table in the report
    baseline = _baseline(rows)
    columns = _filled(shown)
    # Only acceptance rows are divided into sets.
    sets = len({_set(row) for row in rows}) > 1
    about = "" if sets else ", ".join([f"batch {rows[0]['batch']}", _shape(shown[0] if shown else rows[0])])
    tables, details = {}, {}
    for direction, members in grouped([row for row in shown if row.get("tflops")], _direction).items():
        tables[f"{direction}: TFLOP/s (in brackets: times as fast as the best PyTorch backend)"] = _rates(
            members
        )
    for part, title in (("tiers", "Tiers"), ("grid", "Head dimension x length")):
        if chosen := [row for row in rows if row.get("part") == part]:
            details[title] = markdown_table(chosen, _filled(chosen))
    if compared := [row for row in shown if row.get("versus_sdpa") is not None]:
        details["Against the fastest SDPA backend of the same round"] = markdown_table(
            compared, VERDICT_COLUMNS
        )
    if failed := failures(rows, lambda row: f"{row['kernel']}, {_case(row)}, {row['direction']}"):
        tables["Not measured"] = "\n".join(f"- {line}" for line in failed)
    ran = sorted({(row["kernel"], row["implementation"]) for row in rows if row.get("implementation")})
    speedup = f"speedup: {baseline} / variant, median of paired rounds; " if baseline else ""
    return Summary(
        "Attention",
        columns,
        shown,
        about=about,
        findings=tuple(findings(rows)),
        tables=tables,
        details=details,
        notes=(
            f"{speedup}'% peak': of the matmul TFLOP/s measured in the same run",
            "spread: (p90 - p10) / median; GB (10^9): peak on top of the inputs, output included",
            _tiers_note(rows),
            *(
                ["Implementations that ran: " + ", ".join(f"{name}: {which}" for name, which in ran)]
                if ran
                else []
            ),
        ),
    )


def _filled(rows: Rows) -> list[Column]:
    """Return the columns of a table of these rows: no speedups if the baseline was not measured."""
    return [column for column in COLUMNS if column.key != "speedup" or _baseline(rows) is not None]


def _baseline(rows: Rows) -> str | None:
    """Return the kernel that speedups are relative to: its own is exactly 1."""
    return next((str(row["kernel"]) for row in rows if row.get("speedup") == 1.0), None)


def _tiers_note(rows: Rows) -> str:
    named = ", ".join(
        f"{tier} {TIERS[tier]:,}" for tier in _names(rows, "tier") if tier in TIERS and tier[0].isalpha()
    )
    return f"D: head_dim; tier: tokens{f' ({named})' if named else ''}, or queries:keys"


def _rates(rows: Rows) -> str:
    """Return tables of rates: kernels by length for each shape, and the shapes with one length together."""

    def cell(row: Mapping[str, Any]) -> str:
        return f"{row['tflops']:.3g}" + (f" ({row['versus_sdpa']:.2f}x)" if row.get("versus_sdpa") else "")

    parts, alone = [], []
    for shape, members in grouped(rows, lambda row: _set(row) + _shape(row)).items():
        if len({_length(row) for row in members}) == 1:
            alone += members
            continue
        table = pivot(members, lambda row: row["kernel"], _length, cell, corner="kernel \\ length")
        parts += [f"{shape[:1].upper()}{shape[1:]}:", table]
    if alone:
        parts.append(pivot(alone, _case, lambda row: row["kernel"], cell, corner="case \\ kernel"))
    return "\n\n".join(parts)


def _square(rows: Rows) -> Rows:
    return [row for row in rows if row["num_queries"] == row["num_keys"]]


def _names(rows: Rows, key: str) -> list[str]:
    return list(dict.fromkeys(str(row[key]) for row in rows if key in row))


def _direction(row: Mapping[str, Any]) -> str:
    return str(row["direction"])


def _set(row: Mapping[str, Any]) -> str:
    return f"{row['set']}: " if row.get("set") else ""


def _length(row: Mapping[str, Any]) -> str:
    keys = f"{row['num_keys']:,}"
    return keys if row["num_queries"] == row["num_keys"] else f"{row['num_queries']:,}:{keys}"


def _shape(row: Mapping[str, Any]) -> str:
    heads = f"{row['heads']} heads" + (
        "" if row["kv_heads"] == row["heads"] else f" ({row['kv_heads']} of keys)"
    )
    layout = "" if row["layout"] == "contiguous" else f", {row['layout']}"
    data = "" if row.get("data", "normal") == "normal" else f", {row['data']}"
    mask = "causal" if row["causal"] else "full"
    return f"head_dim {row['head_dim']}, {heads}, {mask}, {row['dtype']}{layout}{data}"


def _case(row: Mapping[str, Any]) -> str:
    return f"{_set(row)}{_length(row)} tokens, batch {row['batch']}, {_shape(row)}"


def findings(rows: Rows) -> list[str]:
    """Return the sentences that the rows support."""
    found = []
    tiers = [row for row in rows if row.get("part") == "tiers"]
    timed = [row for row in tiers if row.get("tflops")]
    compared = [row for row in timed if row.get("versus_sdpa") and row["kernel"] == _ours(rows)]
    for direction, members in grouped(compared, _direction).items():
        slowest, fastest = (pick(members, key=lambda row: row["versus_sdpa"]) for pick in (min, max))
        top = max(members, key=lambda row: row["tflops"])
        least = f"{slowest['versus_sdpa']:.2f} ({_case(slowest)}) to " if len(members) > 1 else ""
        found.append(
            f"{direction}: {fastest['kernel']} is {least}{fastest['versus_sdpa']:.2f} ({_case(fastest)}) times as "
            f"fast as the best PyTorch backend ({len(members)} {'case' if len(members) == 1 else 'cases'}). Its "
            f"highest rate is {top['tflops']:.0f} TFLOP/s, {top['share_of_matmul']:.0%} of the matrix product's in "
            "the same run."
        )
    baseline = _baseline(rows)
    for direction, members in grouped(
        timed if len({_set(row) for row in timed}) < 2 else [], _direction
    ).items():
        longest = max(row["num_queries"] * row["num_keys"] for row in members)
        last = [row for row in members if row["num_queries"] * row["num_keys"] == longest]
        best = min(last, key=lambda row: row["median_ms"])
        found.append(
            f"{direction} at {best['tier']}: {best['kernel']} is fastest, {best['median_ms']:.4g} ms, "
            f"{best['tflops']:.3g} TFLOP/s, {best['share_of_matmul']:.1%} of the measured matmul rate."
        )
        ratios = [row for row in members if row.get("speedup") and row["kernel"] != baseline]
        if ratios:
            top = max(ratios, key=lambda row: row["speedup"])
            few = top["verdict"] == "too few repeats"
            interval = (
                "too few rounds for an interval"
                if few
                else f"95% {top['speedup_low']:.2f} to {top['speedup_high']:.2f}"
            )
            found.append(
                f"{direction}: the largest speedup over {baseline} is {top['kernel']}'s at {top['tier']}, "
                f"{top['speedup']:.2f}x ({interval})."
            )
    for kernel, mine in grouped(_square(tiers), lambda row: str(row["kernel"])).items():
        ended = [row["num_keys"] for row in mine if row["status"] == "out of memory"]
        if not ended:
            continue
        limits = [
            row["num_keys"] for row in rows if row.get("part") == "memory limit" and row["kernel"] == kernel
        ]
        fitted = [row["num_keys"] for row in mine if row["status"] == "ok" and row["num_keys"] < min(ended)]
        longest_fit = max(limits or fitted, default=None)
        before = "" if longest_fit is None else f"; the longest that fits is {longest_fit}"
        found.append(f"{kernel} runs out of memory at {min(ended)} tokens{before}.")
    wrong = _names([row for row in rows if row["status"] == "wrong result"], "kernel")
    found += [f"{kernel} gave wrong results (see below) and was not timed there." for kernel in wrong]
    return found or ["No tier was measured."]


def _ours(rows: Rows) -> str | None:
    """Return the last registered kernel among those that were timed and are not PyTorch's."""
    timed = {row["kernel"] for row in rows if row.get("median_ms")}
    return next((name for name in reversed(ATTENTION.names) if name in timed and name != "sdpa"), None)


def pictures(rows: Rows) -> dict[str, bytes]:
    """Draw bars of the tiers, the head_dim x length grid, and time over length."""
    files = {
        "attention_sweep_forward.png": _bars(rows, "forward"),
        "attention_sweep_heatmap.png": _heat_map(rows),
        "attention_sweep_scaling.png": _scaling(rows),
    }
    if any(row["direction"] == "backward" for row in rows):
        files["attention_sweep_backward.png"] = _bars(rows, "backward")
    return files


def _title(rows: Rows, *, head_dim: bool = True) -> str:
    if not rows:
        return ""
    shape = _shape(rows[0])
    return f"batch {rows[0]['batch']}, " + (shape if head_dim else shape.partition(", ")[2])


def _bars(rows: Rows, direction: str) -> bytes:
    chosen = [row for row in rows if row["part"] == "tiers" and row["direction"] == direction]
    tiers = _names(chosen, "tier")
    by_place = {(row["kernel"], row["tier"]): row for row in chosen}
    kernels = _names([row for row in chosen if row.get("median_ms")], "kernel")
    places = {kernel: [by_place[kernel, tier] for tier in tiers] for kernel in kernels}
    labels = []
    for tier in tiers:
        length = next(row["num_keys"] for row in chosen if row["tier"] == tier)
        labels.append(tier if ":" in tier or tier.isdecimal() else f"{tier}\n{length}")
    return grouped_bars(
        labels,
        {kernel: [row.get("median_ms") for row in of_kernel] for kernel, of_kernel in places.items()},
        errors={kernel: [of_time(row) for row in of_kernel] for kernel, of_kernel in places.items()},
        log_y=True,
        reasons={
            kernel: [SHORT_STATUS.get(row["status"], str(row["status"])) for row in of_kernel]
            for kernel, of_kernel in places.items()
        },
        title=f"Attention {direction}: {_title(chosen)} (median, whiskers p10 to p90)",
        x_label="sequence length (tokens; queries:keys where they differ)",
        y_label="time (ms, log scale)",
    )


def _scaling(rows: Rows) -> bytes:
    series: dict[str, list[tuple[float, float]]] = {}
    chosen = [row for row in _square(rows) if row["part"] == "tiers" and row["direction"] == "forward"]
    for row in chosen:
        if row.get("median_ms"):
            series.setdefault(row["kernel"], []).append((row["num_keys"], row["median_ms"]))
    return line_plot(
        series,
        title=f"Attention forward: {_title(chosen)}",
        x_label="sequence length (tokens)",
        y_label="time (ms, log scale)",
        log_x=True,
        log_y=True,
    )


def _heat_map(rows: Rows) -> bytes:
    """Draw the grid (or the square tiers, as one line): our best kernel's speedup over the baseline, else TFLOP/s."""
    chosen = [row for row in _square(rows) if row["direction"] == "forward"]
    chosen = [row for row in chosen if row["part"] == "grid"] or [
        row for row in chosen if row["part"] == "tiers"
    ]
    baseline, ours = _baseline(chosen), _ours(chosen)
    as_ratio = baseline is not None and ours is not None and ours != baseline
    kernel = ours or baseline
    lengths, head_dims = (sorted({row[key] for row in chosen}) for key in ("num_keys", "head_dim"))
    found = {
        (row["head_dim"], row["num_keys"]): row.get("speedup" if as_ratio else "tflops")
        for row in chosen
        if row["kernel"] == kernel
    }
    return heat_map(
        [str(length) for length in lengths],
        [str(head_dim) for head_dim in head_dims],
        [[found.get((head_dim, length)) for length in lengths] for head_dim in head_dims],
        title=f"{kernel}, forward: {_title(chosen, head_dim=False)}",
        x_label="sequence length (tokens)",
        y_label="head_dim",
        value_label=f"times as fast as {baseline}" if as_ratio else "TFLOP/s",
        center=1.0 if as_ratio else None,
    )
