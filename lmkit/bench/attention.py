"""`lmkit bench attention`: cases (tiers, head_dim x length grid) x variants (kernels, eager or compiled).

Every variant is checked (`attention_gate`) before it is timed. Variants of a case are timed in interleaved rounds. A
variant that does not fit, is not supported, or gives wrong results becomes a row that says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import model_validator

from lmkit.bench.attention_summary import pictures as pictures
from lmkit.bench.attention_summary import square_tiers
from lmkit.bench.attention_summary import summarize as summarize
from lmkit.bench.attention_variants import (
    COMPILED,
    Tier,
    build_variant,
    check_kernel,
    default_kernels,
    implementation_of,
    kernel_of,
    matmul_precision,
    parse_tier,
    precision_of,
    refusal_is_a_row,
    timed_call,
)
from lmkit.bench.context import Context, Empties, FlagNames
from lmkit.bench.harness import (
    add_figures,
    grouped,
    not_enough_memory,
    out_of_memory_is_a_row,
    ratio_fields,
    time_fields,
    time_what_fits,
    wrong_result,
)
from lmkit.measure.limits import Limits
from lmkit.measure.memory import GB, available_memory, release_memory, track_peak
from lmkit.measure.tables import Rows
from lmkit.measure.timing import Timing, clock_for, time_variants
from lmkit.recipe.tables import Count, PositiveFloat, PositiveInt, Table
from lmkit.recipe.values import AttentionVariant
from lmkit.registry import ATTENTION, BENCHES

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lmkit.bench.attention_gate import Gate, Inputs

log = logging.getLogger("lmkit")
CUSTOM_TIERS = FlagNames(("--custom-tiers", "--custom_tiers"))
NO_GRID = Empties(("grid_head_dims", "grid_lengths"))
SCORE_COPIES = 3  # scores, masked copy, probabilities: what a kernel that keeps scores holds at once
MEMORY_STEP = 1024  # tokens; how finely the longest sequence that fits is searched
FLOPS = {"forward": 1.0, "backward": 2.5, "fwd+bwd": 3.5}  # five matrix products where forward has two


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
    head_dim: Annotated[PositiveInt, NO_GRID] = 64
    """Dimensions of a head, in the tiers; the flag leaves the recipe's sweep out."""
    causal: bool = True
    """Query i sees keys j <= i; false: all keys."""
    backward: bool = False
    """Also time forward + backward, and backward alone."""
    tiers: Annotated[tuple[Tier, ...], CUSTOM_TIERS, NO_GRID] = ("Small", "Medium", "Large", "XL")
    """Names (Small 128 ... XXL 2048, 4k ... 128k), lengths, or rectangles queries:keys; the flag leaves the recipe's
    sweep out."""
    kernels: Annotated[tuple[AttentionVariant, ...], Empties(("grid_kernels",))] = ()
    """Kernels that `lmkit env` lists, KERNEL:VARIANT such as flash_triton:deterministic, sdpa:cudnn|flash|efficient,
    each with an optional `+compile`; empty: all that run on the device."""
    grid_head_dims: tuple[PositiveInt, ...] = ()
    """Head sizes of the head_dim x length sweep; empty: no sweep."""
    grid_lengths: tuple[PositiveInt, ...] = ()
    """Lengths of the head_dim x length sweep; empty: no sweep."""
    grid_kernels: tuple[AttentionVariant, ...] = ()
    """Kernels of the sweep; empty: `kernels`, or without these the baseline (also compiled), ours and PyTorch's."""
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
    """Skip a kernel if a shorter case predicts that one call takes longer than this."""

    @model_validator(mode="after")
    def _groups_are_whole(self) -> Options:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not divisible by kv_heads {self.kv_heads}")
        return self


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
    compiled = options.baseline.removesuffix("+compile") + "+compile"
    grid_kernels = (
        options.grid_kernels or options.kernels or tuple(dict.fromkeys((options.baseline, compiled, *rivals)))
    )
    for name in (*kernels, *grid_kernels):
        check_kernel(name)
    limits = context.limits([precision_of(name, options.dtype) for name in (*kernels, *grid_kernels)])
    sweep = Sweep(options, limits, device=context.device, seed=context.recipe.run.seed)
    cases = build_cases(options)
    rows: Rows = []
    for done, case in enumerate(cases):
        context.progress("attention", done, len(cases))
        of_case = grid_kernels if case.part == "grid" else kernels
        found = sweep.measure(case, of_case)
        if options.backward:
            found += sweep.measure(case, of_case, ("fwd+bwd", "backward"))
        rows += found
        context.keep(found)
    rows += sweep.longest_that_fit(rows)
    context.progress("attention", len(cases), len(cases))
    return rows


class Sweep:
    """The state that the cases of a run share: options, limits, kernels checked in full, times of calls."""

    def __init__(self, options: Options, limits: Limits, *, device: torch.device, seed: int) -> None:
        self._options = options
        self._limits = limits
        self._device = device
        self._seed = seed
        self._checked: dict[tuple[str, int, bool], list[str]] = {}  # (kernel, head_dim, backward) -> faults
        self._calls: dict[tuple[str, int, str], tuple[float, float]] = {}  # last (FLOPs, ms) measured
        self._too_large: set[tuple[str, Case]] = set()  # forward passes that did not fit

    def measure(self, case: Case, kernels: Sequence[str], directions: Sequence[str] = ("forward",)) -> Rows:
        """Return a row per direction and kernel of one shape.

        Args:
            directions: "forward", or "fwd+bwd" and "backward", which share their inputs.
        """
        import torch

        from lmkit.bench.attention_gate import Gate

        # Every shape is compiled anew: torch.compile would fall back to eager after 8 recompilations, silently.
        torch.compiler.reset()
        backward = "forward" not in directions
        inputs_row: dict[str, Any] = {"status": "ok", "detail": ""}
        inputs: Inputs | None = None
        gate: Gate | None = None
        functions: dict[str, Callable[..., Tensor]] = {}
        rows = {name: self._row(case, name) for name in kernels}
        found: Rows = []
        with matmul_precision(self._options.dtype):
            with out_of_memory_is_a_row(inputs_row, self._device):
                inputs = self._inputs(case, backward=backward)
            for name, row in rows.items():
                if inputs is None:
                    row |= inputs_row | {"detail": f"inputs: {inputs_row['detail']}"}
                elif refusal := self._refusal(name, case, directions[0]):
                    row |= refusal
                else:
                    with out_of_memory_is_a_row(row, self._device), refusal_is_a_row(row):
                        gate = gate or Gate(inputs)
                        function = build_variant(name, self._options.dtype)
                        row |= self._check(name, function, gate, case)
                        if row["status"] == "ok":
                            functions[name] = function
            gate = None  # free its tensors before memory is measured
            for direction in directions:
                of_direction = {name: row | {"direction": direction} for name, row in rows.items()}
                if inputs is not None:
                    self._time(functions, inputs, case, direction, of_direction)
                found += of_direction.values()
        if not backward:
            self._too_large |= {
                (name, case) for name, row in rows.items() if row["status"] == "out of memory"
            }
        release_memory(self._device)
        return found

    def _row(self, case: Case, name: str) -> dict[str, Any]:
        options = self._options
        return {
            **asdict(case),
            "direction": "forward",
            "kernel": name,
            "precision": precision_of(name, options.dtype),
            **{key: getattr(options, key) for key in ("batch", "heads", "kv_heads", "causal", "dtype")},
            "layout": "projection" if options.projection_layout else "contiguous",
            "data": options.data,
            "status": "ok",
            "detail": "",
        }

    def _inputs(self, case: Case, *, backward: bool) -> Inputs:
        from lmkit.bench.attention_gate import make_inputs

        shape = (case.num_queries, case.num_keys, case.head_dim)
        return make_inputs(self._options, *shape, device=self._device, seed=self._seed, backward=backward)

    def _check(self, name: str, function: Callable[..., Tensor], gate: Gate, case: Case) -> dict[str, Any]:
        """Return status, errors, time of the first call and peak memory of a variant."""
        from lmkit.bench.attention_gate import arithmetic_of

        keeps_scores = ATTENTION.facts(kernel_of(name)[0]).keeps_scores
        arithmetic = arithmetic_of(precision_of(name, self._options.dtype), keeps_scores=keeps_scores)
        faults, first_call = self._faults_when_short(name, function, case, gate, arithmetic)
        probed, seconds = self._timed_run(function, gate.probe)
        faults += gate.faults_at_spots(probed, arithmetic)
        fields: dict[str, Any] = {f"error_{tensor}": error for tensor, error in gate.errors(probed).items()}
        del probed
        with track_peak(self._device) as peak:
            results = gate.inputs.run(function)
        faults += gate.faults_against_pytorch(results, arithmetic)
        return fields | {
            **(wrong_result("; ".join(faults)) if faults else {}),
            "peak_gb": peak.extra_bytes / GB,
            "first_call_s": first_call + seconds,
            "implementation": implementation_of(name, gate.inputs),
        }

    def _faults_when_short(
        self, name: str, function: Callable[..., Tensor], case: Case, gate: Gate, arithmetic: Any
    ) -> tuple[list[str], float]:
        """Check every row of a shorter case against float64, once per kernel and head_dim; also return its seconds.

        Not for compiled variants: another shape would be another compilation.
        """
        from lmkit.bench.attention_gate import FULL_CHECK_LENGTH, Gate

        backward = gate.inputs.dout is not None
        key = (name, case.head_dim, backward)
        if name.endswith(COMPILED):
            return [], 0.0
        if max(case.num_queries, case.num_keys) <= FULL_CHECK_LENGTH:
            self._checked[key] = []  # the gate of this case looks at every row
        if key in self._checked:
            return list(self._checked[key]), 0.0
        queries, keys = (min(length, FULL_CHECK_LENGTH) for length in (case.num_queries, case.num_keys))
        short = Gate(self._inputs(replace(case, num_queries=queries, num_keys=keys), backward=backward))
        probed, seconds = self._timed_run(function, short.probe)
        faults = short.faults_at_spots(probed, arithmetic)
        self._checked[key] = [f"at {queries}:{keys}, {fault}" for fault in faults]
        return list(self._checked[key]), seconds

    def _timed_run(self, function: Callable[..., Tensor], inputs: Inputs) -> tuple[tuple[Tensor, ...], float]:
        results: list[tuple[Tensor, ...]] = []
        clock = clock_for(self._device, "wall")
        ms = clock.sample_ms(lambda: results.append(inputs.run(function)), 1, before=())
        return results[0], ms * 1e-3

    def _refusal(self, name: str, case: Case, direction: str) -> dict[str, Any] | None:
        """Return status and detail of a variant that is not even tried; None: try it."""
        options = self._options
        if (name, case) in self._too_large:
            return not_enough_memory("the forward pass alone does not fit")
        flops_before, ms_before = self._calls.get((name, case.head_dim, direction), (0.0, 0.0))
        if flops_before:
            seconds = ms_before * 1e-3 * case.flops(options, direction) / flops_before
            limit = options.longest_call_seconds
            if seconds > max(limit, ms_before * 1e-3):
                detail = f"about {seconds:.2g} s a call, longest_call_seconds is {limit:g}"
                return {"status": "skipped", "detail": detail}
        # On a CPU, Linux kills the process instead of raising: add up the scores that a kernel keeps first.
        free = None if self._device.type == "cuda" else available_memory()
        if free is None or not ATTENTION.facts(kernel_of(name)[0]).keeps_scores:
            return None
        itemsize = 2 if options.dtype in ("bf16", "fp16") else 4
        needed = SCORE_COPIES * options.batch * options.heads * case.num_queries * case.num_keys * itemsize
        if needed <= 0.8 * free:
            return None
        return not_enough_memory(f"needs {needed / GB:.1f} GB, {free / GB:.1f} GB free")

    def _time(
        self,
        functions: Mapping[str, Callable[..., Tensor]],
        inputs: Inputs,
        case: Case,
        direction: str,
        rows: dict[str, dict[str, Any]],
    ) -> None:
        """Add times to the rows of one direction."""
        options = self._options

        def time_together(left: Mapping[str, Callable[..., Tensor]]) -> dict[str, Timing]:
            calls = {name: timed_call(function, inputs, direction) for name, function in left.items()}
            return time_variants(
                {name: call for name, (_, call) in calls.items()},
                prepare={name: before for name, (before, _) in calls.items() if before is not None},
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
        believed = {
            name: timing
            for name, timing in timings.items()
            if add_figures(rows[name], self._limits, partial(self._time_fields, name, timing, flops))
        }
        for name, timing in believed.items():
            rows[name] |= self._ratios(name, believed)
            # Predict from the fastest sample: a busy moment says nothing about the next length.
            self._calls[name, case.head_dim, direction] = (flops, min(timing.samples_ms))

    def _time_fields(self, name: str, timing: Timing, flops: float) -> dict[str, Any]:
        """Return times and rates of one variant."""
        fields = time_fields(timing.samples_ms)
        rate = flops / (fields["median_ms"] * 1e-3)
        peak = self._limits.matmul_flops[precision_of(name, self._options.dtype)]
        fields |= {
            "repeats": len(timing.samples_ms),
            "tflops": rate / 1e12,
            "share_of_matmul": rate / peak,
            "clock": timing.clock,
            "cache": timing.cache,
            "calls_per_sample": timing.calls_per_sample,
        }
        return fields | {"sample_rounds": list(timing.rounds)}

    def _ratios(self, name: str, timings: Mapping[str, Timing]) -> dict[str, Any]:
        """Compare one variant with the baseline and PyTorch's best, among those that were timed with it."""
        timing, options = timings[name], self._options
        fields: dict[str, Any] = {}
        if options.baseline in timings:
            fields |= ratio_fields(timing.versus(timings[options.baseline]))
        rivals = {rival: other for rival, other in timings.items() if rival.split(":")[0] == "sdpa"}
        if rivals and name not in rivals:
            best = min(rivals, key=lambda rival: rivals[rival].median_ms)
            fields["best_sdpa"] = best
            fields |= ratio_fields(timing.versus(rivals[best]), "versus_sdpa", "versus_sdpa_verdict")
        return fields

    def longest_that_fit(self, rows: Rows) -> Rows:
        """Return, for each kernel that ran out of GPU memory in a square tier, the longest forward pass that fits."""
        if self._device.type != "cuda":
            return []
        found: Rows = []
        for name, mine in grouped(square_tiers(rows), lambda row: str(row["kernel"])).items():
            forward = [row for row in mine if row["direction"] == "forward"]
            too_long = min(
                (row["num_keys"] for row in forward if row["status"] == "out of memory"), default=0
            )
            fits = max((row["num_keys"] for row in forward if row["status"] == "ok"), default=0)
            if fits and too_long and not name.endswith(COMPILED):
                found.append(self._longest_between(name, fits, too_long))
        return found

    def _longest_between(self, name: str, fits: int, too_long: int) -> dict[str, Any]:
        function = build_variant(name, self._options.dtype)
        peak_gb = None
        while too_long - fits > MEMORY_STEP:
            length = (fits + too_long) // 2 // MEMORY_STEP * MEMORY_STEP
            trial: dict[str, Any] = {"status": "ok"}
            with out_of_memory_is_a_row(trial, self._device):
                inputs = self._inputs(Case("", "", length, length, self._options.head_dim), backward=False)
                with track_peak(self._device) as peak:
                    inputs.run(function)
                fits, peak_gb = length, peak.extra_bytes / GB
            if trial["status"] != "ok":
                too_long = length
            inputs = None  # type: ignore[assignment]
            release_memory(self._device)
        case = Case("memory limit", str(fits), fits, fits, self._options.head_dim)
        reached = {"status": "longest that fits", "detail": f"{too_long} tokens do not", "peak_gb": peak_gb}
        return self._row(case, name) | reached
