"""Check and time the kernels of `lmkit bench attention`, case by case: `Sweep`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lmkit.bench.attention_variants import (
    COMPILED,
    Case,
    build_variant,
    implementation_of,
    kernel_of,
    matmul_precision,
    precision_of,
    square_tiers,
    timed_call,
)
from lmkit.bench.context import failure_is_a_row, not_enough_memory, time_what_fits, wrong_result
from lmkit.bench.harness import add_figures, grouped, ratio_fields, time_fields
from lmkit.bench.summary import UNCHECKED
from lmkit.measure.limits import Limits
from lmkit.measure.memory import GB, available_memory, release_memory, track_peak
from lmkit.measure.tables import Rows
from lmkit.measure.timing import Timing, clock_for, time_variants
from lmkit.registry import ATTENTION

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lmkit.bench.attention import Options
    from lmkit.bench.attention_gate import Arithmetic, Gate, Inputs

SCORE_COPIES = 3  # scores, masked copy, probabilities: what a kernel that keeps scores holds at once
MEMORY_STEP = 1024  # tokens; how finely the longest sequence that fits is searched


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
        with matmul_precision(self._options.dtype):
            with failure_is_a_row(inputs_row, self._device):
                inputs = self._inputs(case, backward=backward)
            for name, row in rows.items():
                if inputs is None:
                    row |= inputs_row | {"detail": f"inputs: {inputs_row['detail']}"}
                elif refusal := self._refusal(name, case, directions[0]):
                    row |= refusal
                else:
                    with failure_is_a_row(row, self._device):
                        gate = gate or Gate(inputs)
                        function = build_variant(name, self._options.dtype)
                        row |= self._check(name, function, gate, case)
                    row |= self._written(gate)
                    if row["status"] == "ok":
                        functions[name] = function
            gate = None  # free its tensors before memory is measured
            of_directions = [
                {name: row | {"direction": direction} for name, row in rows.items()}
                for direction in directions
            ]
            if functions:
                assert inputs is not None
                timings = [
                    self._time(functions, inputs, direction, timed)
                    for direction, timed in zip(directions, of_directions, strict=True)
                ]
                again = self._check_again(functions, inputs, case)
                for direction, timed, of_rows in zip(directions, timings, of_directions, strict=True):
                    for name in again:
                        of_rows[name] |= again[name]
                    right = {name: timing for name, timing in timed.items() if name not in again}
                    self._add_times(right, case, direction, of_rows)
            found = [row for of_rows in of_directions for row in of_rows.values()]
        if not backward:
            self._too_large |= {
                (name, case) for name, row in rows.items() if row["status"] == "out of memory"
            }
        release_memory(self._device)
        return found

    def _written(self, gate: Gate | None) -> dict[str, Any]:
        """Return status and detail of a kernel that wrote into its inputs, which are restored; else {}."""
        written = gate.restore() if gate is not None else ""
        return wrong_result(f"writes into its inputs: {written}") if written else {}

    def _check_again(
        self, functions: Mapping[str, Callable[..., Tensor]], inputs: Inputs, case: Case
    ) -> dict[str, dict[str, Any]]:
        """Return status and detail of kernels that were right before they were timed, and are not any more.

        The inputs get other numbers, at the same addresses: a stored result is now a wrong one.
        """
        from lmkit.bench.attention_gate import Gate

        again: dict[str, dict[str, Any]] = {name: {"status": "ok"} for name in functions}
        gate: Gate | None = None
        for name, function in functions.items():
            with failure_is_a_row(again[name], self._device):
                if gate is None:
                    inputs.copy_(self._inputs(case, backward=inputs.dout is not None, seed=self._seed + 1))
                    gate = Gate(inputs, self._seed + 1)
                arithmetic = self._arithmetic(name)
                faults = gate.faults_at_spots(gate.probe.run(function), arithmetic)
                faults += gate.faults_against_pytorch(inputs.run(function), arithmetic)
                if faults:
                    again[name] |= wrong_result(f"after timing, on other inputs: {'; '.join(faults)}")
            again[name] |= self._written(gate)
        return {name: row for name, row in again.items() if row["status"] != "ok"}

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

    def _inputs(self, case: Case, *, backward: bool, seed: int | None = None) -> Inputs:
        from lmkit.bench.attention_gate import make_inputs

        shape = (case.num_queries, case.num_keys, case.head_dim)
        seed = self._seed if seed is None else seed
        return make_inputs(self._options, *shape, device=self._device, seed=seed, backward=backward)

    def _check(self, name: str, function: Callable[..., Tensor], gate: Gate, case: Case) -> dict[str, Any]:
        """Return status, errors, time of the first call and peak memory of a variant."""
        arithmetic = self._arithmetic(name)
        faults, first_call = self._faults_when_short(name, function, case, gate, arithmetic)
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

    def _arithmetic(self, name: str) -> Arithmetic | None:
        """Return where a variant rounds; None for attention that does not see all keys, which PyTorch's does."""
        from lmkit.bench.attention_gate import arithmetic_of

        facts, precision = ATTENTION.facts(kernel_of(name)[0]), precision_of(name, self._options.dtype)
        return arithmetic_of(precision, keeps_scores=facts.keeps_scores) if facts.sees_all else None

    def _faults_when_short(
        self,
        name: str,
        function: Callable[..., Tensor],
        case: Case,
        gate: Gate,
        arithmetic: Arithmetic | None,
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
        direction: str,
        rows: dict[str, dict[str, Any]],
    ) -> dict[str, Timing]:
        """Return the times of one direction; rows say which kernels have none."""
        options = self._options

        def time_together(
            left: Mapping[str, Callable[..., Tensor]], turn: Callable[[str], object]
        ) -> dict[str, Timing]:
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
                turn=turn,
            )

        guard = partial(failure_is_a_row, device=self._device)
        return time_what_fits(dict(functions), rows, guard, time_together)

    def _add_times(
        self, timings: Mapping[str, Timing], case: Case, direction: str, rows: dict[str, dict[str, Any]]
    ) -> None:
        """Add times to the rows of one direction."""
        options = self._options
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
            with failure_is_a_row(trial, self._device):
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
