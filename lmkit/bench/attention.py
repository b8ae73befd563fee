"""`lmkit bench attention`: cases (tiers, head_dim x length grid) x variants (kernels, eager or compiled).

Every variant is checked (`attention_gate`) before it is timed, and again afterwards on other numbers at the same
addresses. Attention that does not see all keys has nothing to be compared with, and its row says so.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, model_validator

from lmkit.bench.context import Context
from lmkit.bench.failures import failure_is_a_row, not_enough_memory, wrong_result
from lmkit.bench.harness import ratio_fields, time_fields
from lmkit.bench.summary import UNCHECKED
from lmkit.bench.trainings import SPREAD, Variant, interval, measure_figures
from lmkit.errors import UsageError, did_you_mean
from lmkit.measure.limits import Limits, matmul_precision
from lmkit.measure.memory import GB, available_memory, release_memory, track_peak
from lmkit.measure.plots import grouped_bars, heat_map, line_panels
from lmkit.measure.tables import Column, Rows, grouped, markdown_table
from lmkit.measure.timing import Timing, Work, time_variants, wall_clock
from lmkit.recipe.keys import Empties, FlagNames
from lmkit.recipe.tables import Count, PositiveFloat, PositiveInt, Table
from lmkit.recipe.values import AttentionVariant
from lmkit.registry import ATTENTION, BENCHES

if TYPE_CHECKING:
    from torch import Tensor

    from lmkit.bench.attention_gate import Arithmetic, Gate, Inputs

_NAMES = ("Small", "Medium", "Large", "XL", "XXL", "4k", "8k", "16k", "32k", "64k", "128k")
TIERS: dict[str, int] = {name: 128 << doublings for doublings, name in enumerate(_NAMES)}
"""Name -> tokens: Small has 128, and each tier has twice as many as the tier before."""
ABLATIONS = ("flash_triton:no_skip", "flash_triton:atomic")
"""Functions of `lmkit.bench.attention_ablations`."""
COMPILED = "+compile"
ODD_LENGTH = 100
IGNORED = 0.05  # ten times what bfloat16 rounds, a tenth of what leaving out an argument changes
FLOPS = {"forward": 1.0, "backward": 2.5, "fwd+bwd": 3.5}  # five matrix products where forward has two


@dataclass(frozen=True)
class Case:
    """One shape. `part` is "tiers" or "grid"; `tier` its name, such as "XXL" or "128:64"."""

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


def parse_tier(text: str) -> tuple[int, int]:
    """Return (num_queries, num_keys) of "XXL", "2048" or "128:64"."""
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
NO_GRID = Empties(("grid_head_dims", "grid_lengths"))


class Options(Table):
    """`[bench.attention]`."""

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


def build_cases(options: Options) -> list[Case]:
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
    """Return a row per case, variant and direction."""
    options: Options = context.options
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
    sweep = Sweep(context, limits)

    def measure(case: Case) -> Rows:
        of_case = grid_kernels if case.part == "grid" else kernels
        found = sweep.measure(case, of_case)
        if options.backward:
            found += sweep.measure(case, of_case, ("fwd+bwd", "backward"))
        return found

    return context.rows_of("attention", build_cases(options), measure)


def default_kernels(*, on_gpu: bool) -> tuple[str, ...]:
    """Return what is measured by default: every kernel that runs on the device."""
    found: list[str] = []
    for name in ATTENTION.names:
        facts = ATTENTION.facts(name)
        if not facts.missing and ("cuda" if on_gpu else "cpu") in facts.devices:
            found += ["sdpa:cudnn", "sdpa:flash"] if name == "sdpa" and on_gpu else [name]
            found += [name + COMPILED] if name == "vectorized" else []
    return tuple(found)


def check_kernel(name: str) -> None:
    """Raise UsageError unless `build_variant` knows the name."""
    known = [*ATTENTION.names, *ABLATIONS]
    known += [f"{kernel}:{way}" for kernel in ATTENTION.names for way in ATTENTION.facts(kernel).variants]
    plain = name.removesuffix(COMPILED)
    if plain not in known:
        raise UsageError(
            "bench.unknown_kernel",
            f"bench.attention.kernels: there is no {name!r}{did_you_mean(plain, known)}",
            hint=f"there are {', '.join(dict.fromkeys(known))}, each with an optional {COMPILED}, "
            "and those of --plugin FILE",
        )


def kernel_of(name: str) -> tuple[str, Mapping[str, Any]]:
    """Return the kernel of a variant, and the arguments that the variant adds to its calls."""
    plain = name.removesuffix(COMPILED)
    kernel, _, variant = plain.partition(":")
    if plain in ABLATIONS:
        return kernel, {"implementation": "portable"}
    return kernel, ATTENTION.facts(kernel).variants.get(variant, {})


def build_variant(name: str, dtype: str) -> Callable[..., Tensor]:
    """Return the attention function of a variant; kernels with their own matrix products are told "tf32"."""
    import torch

    from lmkit.attention import attention_function

    plain = name.removesuffix(COMPILED)
    kernel, arguments = kernel_of(name)
    function: Callable[..., Tensor]
    if plain in ABLATIONS:
        attention_function(kernel)  # refuses if a package is not installed
        from lmkit.bench import attention_ablations

        function = getattr(attention_ablations, plain.partition(":")[2])
    else:
        tf32 = ATTENTION.facts(kernel).variants.get("tf32", {}) if dtype == "tf32" else {}
        function = ATTENTION.load(kernel)  # without the check of its first call: the gate makes a row of it
        if tf32 or arguments:
            function = partial(function, **{**tf32, **arguments})
    return torch.compile(function, dynamic=False) if name.endswith(COMPILED) else function


def precision_of(name: str, dtype: str) -> str:
    """Return the label of a row: the bench's dtype, or tf32 for a variant that multiplies float32 so."""
    return "tf32" if dtype == "fp32" and name.removesuffix(COMPILED).endswith(":tf32") else dtype


def implementation_of(name: str, inputs: Inputs) -> str | None:
    """Return the name of the implementation that a kernel runs; None for kernels with only one."""
    kernel, arguments = kernel_of(name)
    function = ATTENTION.facts(kernel).implementation
    if function is None:
        return None
    forced: str | None = arguments.get("implementation")
    return forced or ATTENTION.function_of(kernel, function)(inputs.q, inputs.k, inputs.v)


def timed_call(function: Callable[..., Tensor], inputs: Inputs, direction: str) -> tuple[Work | None, Work]:
    """Return (untimed preparation of each call or None, the call) of a direction: forward, fwd+bwd or backward."""
    import torch

    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    outputs: list[Tensor] = []

    def forward_alone() -> object:
        with torch.no_grad():
            return function(inputs.q, inputs.k, inputs.v, causal=inputs.causal)

    def forward() -> None:
        outputs.clear()  # a sample that was taken again left one
        outputs.append(function(*leaves, causal=inputs.causal))

    def backward() -> object:
        return torch.autograd.grad(outputs.pop(), leaves, inputs.dout)

    def both() -> object:
        forward()
        return backward()

    if direction == "forward":
        return None, forward_alone
    return (forward, backward) if direction == "backward" else (None, both)


SCORE_COPIES = 3  # scores, masked copy, probabilities: what a kernel that keeps scores holds at once


class Sweep:
    """The state that the cases of a run share: options, limits, kernels checked in full, times of calls."""

    def __init__(self, context: Context, limits: Limits) -> None:
        self._context, self._limits = context, limits
        self._options: Options = context.options
        self._device, self._seed = context.device, context.recipe.run.seed
        self._checked: dict[tuple[str, int, bool], list[str]] = {}  # (kernel, head_dim, backward) -> faults
        self._calls: dict[tuple[str, int, str], tuple[float, float]] = {}  # last (FLOPs, ms) measured

    def measure(self, case: Case, kernels: Sequence[str], directions: Sequence[str] = ("forward",)) -> Rows:
        """Return a row per kernel and direction ("forward", or "fwd+bwd" and "backward", which share inputs)."""
        import torch

        from lmkit.bench.attention_gate import Gate

        # Every shape is compiled anew: torch.compile would fall back to eager after 8 recompilations, silently.
        torch.compiler.reset()
        options, backward = self._options, "forward" not in directions
        inputs_row: dict[str, Any] = {"status": "ok", "detail": ""}
        made: list[Inputs] = []
        gates: list[Gate] = []  # one, made for the first kernel; gone while kernels are timed
        function_of = cache(partial(build_variant, dtype=options.dtype))

        def checked(check: Callable[[Gate], dict[str, Any]], seed: int) -> dict[str, Any]:
            found: dict[str, Any] = {"status": "ok", "detail": ""}
            with failure_is_a_row(found, self._device):
                if not gates:
                    gates.append(Gate(made[0], seed))
                found |= check(gates[0])
            written = gates[0].restore() if gates else ""
            return found | (wrong_result(f"writes into its inputs: {written}") if written else {})

        def make(name: str, direction: str) -> tuple[str, Work | None, Work]:
            return name, *timed_call(function_of(name), made[0], direction)

        @cache
        def judge(name: str) -> dict[str, Any]:
            return checked(partial(self._check, name, function_of(name), case=case), self._seed)

        @cache
        def check_again(name: str) -> dict[str, Any]:
            if not gates:  # other numbers at the same addresses: a stored result is now a wrong one
                made[0].copy_(self._inputs(case, backward=backward, seed=self._seed + 1))
            found = checked(partial(self._check_again, name, function_of(name)), self._seed + 1)
            return {} if found["status"] == "ok" else found

        def take(runs: Mapping[str, Any], prepare: Mapping[str, Any], turn: Any) -> dict[str, Timing]:
            gates.clear()
            return time_variants(
                runs,
                prepare=prepare,
                device=self._device,
                repeats=options.iters,
                warmup=options.warmup,
                cold_cache=options.cold_cache,
                min_sample_ms=0.2,  # 400 times what CUDA events resolve
                max_seconds=options.max_seconds * len(directions),
                share_seconds=True,
                seed=self._seed,
                turn=turn,
            )

        with matmul_precision(options.dtype):
            with failure_is_a_row(inputs_row, self._device):
                made.append(self._inputs(case, backward=backward))
            inputs_row["detail"] = f"inputs: {inputs_row['detail']}"
            variants = {
                f"{direction} {name}": Variant(
                    row=self._row(case, name, direction)
                    | (self._refusal(name, case, direction) if made else inputs_row),
                    make=partial(make, name, direction),
                    judge=lambda built: judge(built[0]),
                    prepare=(lambda built: built[1]()) if direction == "backward" else None,
                    run=lambda built: built[2](),
                    check=lambda built: check_again(built[0]),
                )
                for direction in directions
                for name in kernels
            }
            figures = partial(self._figures, case)
            believed = measure_figures(variants, self._context, self._limits, figures, take=take)
        made.clear()
        gates.clear()
        release_memory(self._device)
        for key, timing in believed.items():
            direction, _, name = key.partition(" ")
            variants[key].row |= self._ratios(key, believed)
            # Predict from the fastest sample: a busy moment says nothing about the next length.
            fastest = case.flops(options, direction), min(timing.samples_ms)
            self._calls[name, case.head_dim, direction] = fastest
        return [variant.row for variant in variants.values()]

    def _row(self, case: Case, name: str, direction: str) -> dict[str, Any]:
        options = self._options
        return {
            **asdict(case),
            "direction": direction,
            "kernel": name,
            "precision": precision_of(name, options.dtype),
            **{key: getattr(options, key) for key in ("batch", "heads", "kv_heads", "causal", "dtype")},
            "layout": "projection" if options.projection_layout else "contiguous",
            "data": options.data,
        }

    def _inputs(self, case: Case, *, backward: bool, seed: int | None = None) -> Inputs:
        from lmkit.bench.attention_gate import make_inputs

        shape = (case.num_queries, case.num_keys, case.head_dim)
        seed = self._seed if seed is None else seed
        return make_inputs(self._options, *shape, device=self._device, seed=seed, backward=backward)

    def _check(self, name: str, function: Callable[..., Tensor], gate: Gate, *, case: Case) -> dict[str, Any]:
        """Return status, errors, time of the first call and peak memory of a variant."""
        arithmetic = self._arithmetic(name)
        faults, first_call = self._faults_when_short(name, function, case, gate)
        probed, seconds = self._timed_run(function, gate.probe)
        faults += gate.faults_at_spots(probed, arithmetic)
        fields: dict[str, Any] = {UNCHECKED: f"{kernel_of(name)[0]} does not say which keys a query sees"}
        if arithmetic is not None:
            fields = {f"error_{tensor}": error for tensor, error in gate.errors(probed).items()}
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

    def _check_again(self, name: str, function: Callable[..., Tensor], gate: Gate) -> dict[str, Any]:
        """Return status and detail of a kernel that was right before it was timed, and is not any more, else {}."""
        arithmetic = self._arithmetic(name)
        faults = gate.faults_at_spots(gate.probe.run(function), arithmetic)
        faults += gate.faults_against_pytorch(gate.inputs.run(function), arithmetic)
        return wrong_result(f"after timing, on other inputs: {'; '.join(faults)}") if faults else {}

    def _arithmetic(self, name: str) -> Arithmetic | None:
        """Return where a variant rounds; None for attention that does not see all keys, which PyTorch's does."""
        from lmkit.bench.attention_gate import arithmetic_of

        facts, precision = ATTENTION.facts(kernel_of(name)[0]), precision_of(name, self._options.dtype)
        return arithmetic_of(precision, keeps_scores=facts.keeps_scores) if facts.sees_all else None

    def _faults_when_short(
        self, name: str, function: Callable[..., Tensor], case: Case, gate: Gate
    ) -> tuple[list[str], float]:
        """Check a shorter case and an odd one against float64, once per kernel and head_dim. Also return the seconds
        of the former.

        Not for compiled variants: another shape would be another compilation.
        """
        from lmkit.bench.attention_gate import FULL_CHECK_LENGTH, Gate

        backward = gate.inputs.dout is not None
        key = (name, case.head_dim, backward)
        if name.endswith(COMPILED):
            return [], 0.0
        if key in self._checked:
            return list(self._checked[key]), 0.0
        self._checked[key] = self._faults_when_odd(name, function, case, backward=backward)
        if max(case.num_queries, case.num_keys) <= FULL_CHECK_LENGTH:
            return list(self._checked[key]), 0.0  # the gate of this case looks at every row
        queries, keys = (min(length, FULL_CHECK_LENGTH) for length in (case.num_queries, case.num_keys))
        short = Gate(self._inputs(replace(case, num_queries=queries, num_keys=keys), backward=backward))
        probed, seconds = self._timed_run(function, short.probe)
        faults = short.faults_at_spots(probed, self._arithmetic(name))
        self._checked[key] += [f"at {queries}:{keys}, {fault}" for fault in faults]
        return list(self._checked[key]), seconds

    def _faults_when_odd(
        self, name: str, function: Callable[..., Tensor], case: Case, *, backward: bool
    ) -> list[str]:
        """Check a length that no tile divides, with fewer key heads than heads. A kernel that refuses it is right."""
        from lmkit.bench.attention_gate import Gate, make_inputs

        options = self._options.changed(batch=1, heads=4, kv_heads=2)
        shape = (ODD_LENGTH, ODD_LENGTH, case.head_dim)
        odd = Gate(make_inputs(options, *shape, device=self._device, seed=self._seed, backward=backward))
        faults: list[str] = []
        with failure_is_a_row({}, self._device):
            faults += odd.faults_at_spots(odd.probe.run(function), self._arithmetic(name))
        if self._arithmetic(name) is not None:
            faults += self._ignored(name, function, odd.inputs)
        return [f"at {ODD_LENGTH}:{ODD_LENGTH} with 4 heads and 2 key heads, {fault}" for fault in faults]

    def _ignored(self, name: str, function: Callable[..., Tensor], inputs: Inputs) -> list[str]:
        """Return the arguments that the kernel takes, and that do not change its output as they should."""
        import torch

        from lmkit.core.attention import first_in_window, reference

        q, k, v = inputs.q, inputs.k, inputs.v
        given: dict[str, Any] = {}
        if "scale" in inspect.signature(function).parameters:
            given["scale"] = {"scale": 0.5 * q.shape[-1] ** -0.5}
        if ATTENTION.facts(kernel_of(name)[0]).windows:
            given["first"] = {"first": first_in_window(7, q.shape[2], q.device)}
        wrong = []
        for argument, values in given.items():
            with failure_is_a_row({}, self._device), torch.no_grad():
                exact = reference(q.double(), k.double(), v.double(), causal=True, **values)
                found = function(q, k, v, causal=True, **values).double()
                error = float((found - exact).norm() / exact.norm())
                if not error <= IGNORED:
                    wrong.append(f"out: relative error {error:.2g} with {argument}=")
        return wrong

    def _timed_run(self, function: Callable[..., Tensor], inputs: Inputs) -> tuple[tuple[Tensor, ...], float]:
        results: list[tuple[Tensor, ...]] = []
        ms = wall_clock(self._device).sample_ms(lambda: results.append(inputs.run(function)), 1)
        return results[0], ms * 1e-3

    def _refusal(self, name: str, case: Case, direction: str) -> dict[str, Any]:
        """Return status and detail of a variant that is not even tried, else {}."""
        options = self._options
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
            return {}
        itemsize = 2 if options.dtype in ("bf16", "fp16") else 4
        needed = SCORE_COPIES * options.batch * options.heads * case.num_queries * case.num_keys * itemsize
        too_large = not_enough_memory(f"needs {needed / GB:.1f} GB, {free / GB:.1f} GB free")
        return too_large if needed > 0.8 * free else {}

    def _figures(self, case: Case, key: str, timing: Timing) -> dict[str, Any]:
        direction, _, name = key.partition(" ")
        fields = time_fields(timing.samples_ms)
        rate = case.flops(self._options, direction) / (fields["median_ms"] * 1e-3)
        return fields | {
            "repeats": len(timing.samples_ms),
            "tflops": rate / 1e12,
            "share_of_matmul": rate / self._limits.matmul_flops[precision_of(name, self._options.dtype)],
            "clock": timing.clock,
            "cache": timing.cache,
            "calls_per_sample": timing.calls_per_sample,
            "sample_rounds": list(timing.rounds),
        }

    def _ratios(self, key: str, believed: Mapping[str, Timing]) -> dict[str, Any]:
        """Compare one variant with the baseline and PyTorch's best, among those of its direction."""
        direction, _, name = key.partition(" ")
        of = (other.split(" ") for other in believed)
        timings = {kernel: believed[f"{way} {kernel}"] for way, kernel in of if way == direction}
        timing, baseline = timings[name], self._options.baseline
        fields: dict[str, Any] = {}
        if baseline in timings:
            fields |= ratio_fields(timing.versus(timings[baseline]))
        rivals = {rival: other for rival, other in timings.items() if rival.split(":")[0] == "sdpa"}
        if rivals and name not in rivals:
            best = min(rivals, key=lambda rival: rivals[rival].median_ms)
            fields["best_sdpa"] = best
            fields |= ratio_fields(timing.versus(rivals[best]), "versus_sdpa", "versus_sdpa_verdict")
        return fields


TITLE, EACH = "Attention", "direction"
ABOUT = ("batch", "heads", "kv_heads", "causal", "dtype", "layout", "data")
TIME = Column("median_ms", "ms", ".3g", instead="status", axis="time, ms")
COLUMNS = (
    Column("tier", "tier"),
    Column("head_dim", "D", "d"),
    Column("direction", "direction"),
    Column("kernel", "kernel"),
    TIME,
    SPREAD,
    Column("tflops", "TFLOP/s", ".3g", better="higher"),
    Column("share_of_matmul", "% peak", ".1%", note="of the matmul TFLOP/s measured in the same run"),
    Column("peak_gb", "GB", ".3g", note="10^9 bytes, peak on top of the inputs, output included"),
    Column("speedup", "speedup", ".2f", note="baseline / variant, median of paired rounds"),
    Column("causal", "causal", wide=True),
    Column("versus_sdpa", "x PyTorch", ".3f", wide=True),
    *interval("versus_sdpa", ".3f"),
    Column("best_sdpa", "that is", wide=True),
)
NOTES = ("D: head_dim; tier: tokens, or queries:keys",)


def shown(rows: Rows) -> Rows:
    return [row for row in rows if row.get("part") != "grid"]


def tables(rows: Rows) -> dict[str, str]:
    grid = [row for row in rows if row.get("part") == "grid"]
    return {"Head dimension x length": markdown_table(grid, COLUMNS)} if grid else {}


def findings(rows: Rows) -> list[str]:
    """Compare our fastest kernel with PyTorch's best, for each direction."""
    found = []
    compared = [row for row in rows if row.get("versus_sdpa") and row.get("tflops")]
    for direction, members in grouped(compared, lambda row: str(row["direction"])).items():
        top = max(members, key=lambda row: row["tflops"])
        ratios = [row["versus_sdpa"] for row in members if row["kernel"] == top["kernel"]]
        found.append(
            f"{direction}: {top['kernel']} is {min(ratios):.2f} to {max(ratios):.2f} times as fast as the best "
            f"PyTorch backend (cases: {len(ratios)}); its highest rate is {top['tflops']:.3g} TFLOP/s, "
            f"{top['share_of_matmul']:.0%} of the matrix product's in the same run."
        )
    return found


def pictures(rows: Rows) -> dict[str, bytes]:
    """Draw forward and backward bars, scaling, and the grid (or the square tiers, as one line)."""
    tiers = [row for row in rows if row["part"] == "tiers"]
    square = [row for row in tiers if row["num_queries"] == row["num_keys"] and row["direction"] == "forward"]
    grid = [row for row in rows if row["part"] == "grid" and row["direction"] == "forward"]
    axis: Any = {"x_label": "sequence length (tokens; queries:keys where they differ)", "log_y": True}
    title = _title(square, "forward")
    scaling = line_panels(square, "num_keys", TIME, group="kernel", title=title, **axis)
    files = {"heatmap": _heat_map(grid or square), "scaling": scaling}
    for direction in ("forward", "backward"):
        if chosen := [row for row in tiers if row["direction"] == direction]:
            title = _title(chosen, direction) + " (median, whiskers p10 to p90)"
            files[direction] = grouped_bars(chosen, TIME, group="tier", series="kernel", title=title, **axis)
    return {f"attention_sweep_{name}.png": picture for name, picture in files.items()}


def _title(rows: Rows, what: str) -> str:
    shape = "".join(f": batch {row['batch']}, {row['heads']} heads, {row['dtype']}" for row in rows[:1])
    return f"Attention {what}{shape}"


def _heat_map(rows: Rows) -> bytes:
    """Draw our last kernel's speedup over the baseline; TFLOP/s if there is no other kernel."""
    timed = {row["kernel"] for row in rows if row.get("median_ms")}
    baseline = next((row["kernel"] for row in rows if row.get("speedup") == 1.0), None)
    kernel = next((name for name in reversed(ATTENTION.names) if name in timed and name != "sdpa"), baseline)
    as_ratio = baseline is not None and kernel != baseline
    lengths, head_dims = (sorted({row[key] for row in rows}) for key in ("num_keys", "head_dim"))
    key = "speedup" if as_ratio else "tflops"
    found = {(row["head_dim"], row["num_keys"]): row.get(key) for row in rows if row["kernel"] == kernel}
    return heat_map(
        [str(length) for length in lengths],
        [str(head_dim) for head_dim in head_dims],
        [[found.get((head_dim, length)) for length in lengths] for head_dim in head_dims],
        title=_title(rows, f"forward, {kernel}"),
        x_label="sequence length (tokens)",
        y_label="head_dim",
        value_label=f"times as fast as {baseline}" if as_ratio else "TFLOP/s",
        center=1.0 if as_ratio else None,
    )
