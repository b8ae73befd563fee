"""Cases x variants of the attention bench, measured one case after the other.

Every variant of a case first passes the gate (`attention_gate`), then has its peak memory taken, then all that
passed are timed together in interleaved rounds (`attention_clock`). What does not fit, is not supported, takes too
long or is wrong becomes a row that says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from lmkit.attention.accuracy import run_attention
from lmkit.bench.attention_cases import DTYPES, AttentionOptions, Case, make_inputs
from lmkit.bench.attention_clock import time_fields, time_functions
from lmkit.bench.attention_gate import FULL_CHECK_LENGTH, Gate, Inputs
from lmkit.bench.attention_variants import (
    COMPILED,
    KEEP_SCORES,
    SDPA_REFUSALS,
    arithmetic_of,
    build_variant,
    implementation_of,
    precision_of,
)
from lmkit.errors import UsageError
from lmkit.measure.limits import Limits
from lmkit.measure.memory import GB, available_memory, is_out_of_memory, release_memory, track_peak
from lmkit.measure.tables import Rows
from lmkit.measure.timing import Timing

SCORE_COPIES = 3  # scores, masked copy, probabilities: what a kernel that keeps scores holds at once
MEMORY_STEP = 1024  # tokens; how finely the longest sequence that fits is looked for


class Sweep:
    """What the cases of one run share: options, limits, which kernels were checked in full, how long calls took."""

    def __init__(self, options: AttentionOptions, limits: Limits) -> None:
        self._options = options
        self._limits = limits
        # (kernel, head_dim, backward) -> faults on every row of a short case
        self._checked: dict[tuple[str, int, bool], list[str]] = {}
        self._calls: dict[tuple[str, int, str], tuple[float, float]] = {}  # last (FLOPs, ms) measured

    def measure(
        self,
        case: Case,
        kernels: Sequence[str],
        gradients: Sequence[str] = ("fwd+bwd", "backward"),
        backward_only: Sequence[str] = (),
    ) -> Rows:
        """All rows of one shape: forward, and with the option `backward` those of `gradients`.

        The grid is forward only: its picture shows nothing else.

        Args:
            backward_only: further kernels, whose forward pass is that of another.
        """
        # Every shape is compiled anew: torch.compile would fall back to eager after 8 recompilations, silently.
        torch.compiler.reset()
        with _matmul_precision(self._options.dtype):
            rows = self._measure_directions(case, kernels, ("forward",))
            if self._options.backward and case.part != "grid":
                too_large = {row["kernel"] for row in rows if row["status"] == "out of memory"}
                rows += self._measure_directions(case, (*kernels, *backward_only), gradients, too_large)
        release_memory(self._options.device)
        return rows

    def _measure_directions(
        self,
        case: Case,
        kernels: Sequence[str],
        directions: Sequence[str],
        too_large: Collection[str] = (),
    ) -> Rows:
        """Rows of directions that share their inputs. `too_large`: kernels whose forward pass did not fit."""
        options = self._options
        backward = "forward" not in directions
        rows = {
            (direction, name): {
                **asdict(case),
                "direction": direction,
                "kernel": name,
                **_shared_fields(options),
                "precision": precision_of(name, options.dtype),
            }
            for direction in directions
            for name in kernels
        }

        def mark(name: str, fields: dict[str, Any]) -> None:
            for direction in directions:
                rows[direction, name] |= fields

        try:
            inputs = make_inputs(case, options, backward=backward)
        except torch.OutOfMemoryError as error:
            for name in kernels:
                mark(name, {"status": "out of memory", "detail": f"inputs: {str(error).split('. ')[0]}"})
            return list(rows.values())
        gate = None
        runnable: dict[str, Callable[..., Tensor]] = {}
        for name in kernels:
            refusal = self._refusal(name, case, directions[0])
            if name in too_large:
                refusal = {"status": "out of memory", "detail": "the forward pass alone does not fit"}
            if refusal is not None:
                mark(name, refusal)
                continue
            try:
                gate = gate or Gate(inputs)
                function = build_variant(name, options.dtype)
                fields = self._check_and_weigh(name, function, gate, case, backward)
            except (UsageError, ValueError, NotImplementedError) as error:
                mark(name, {"status": "unsupported", "detail": str(error)})
            except RuntimeError as error:
                if is_out_of_memory(error):
                    mark(name, {"status": "out of memory", "detail": str(error).split(". ")[0]})
                    continue
                if isinstance(error, torch.AcceleratorError):
                    raise  # the device is lost for this process: nothing after it could be trusted
                refused = any(words in str(error) for words in SDPA_REFUSALS)
                status = "unsupported" if refused else "failed"
                mark(name, {"status": status, "detail": str(error).splitlines()[0]})
            else:
                mark(name, fields)
                if fields["status"] == "ok":
                    runnable[name] = function
        gate = None  # its tensors would only take memory from what is measured
        for direction in directions:
            timings = self._time_what_fits(runnable, inputs, direction, rows)
            for name in timings:
                flops = case.flops(options, direction)
                rows[direction, name] |= time_fields(name, timings, flops, options, self._limits)
                # The fastest: what a busy moment does to a sample says nothing about the next length.
                self._calls[name, case.head_dim, direction] = (flops, min(timings[name].samples_ms))
        return list(rows.values())

    def _time_what_fits(
        self,
        functions: dict[str, Callable[..., Tensor]],
        inputs: Inputs,
        direction: str,
        rows: dict[tuple[str, str], dict[str, Any]],
    ) -> dict[str, Timing]:
        """Timings in turns. What fits alone may not fit beside the others: then the largest gives way."""
        left = dict(functions)
        while left:
            try:
                return time_functions(left, inputs, self._options, direction)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                largest = max(left, key=lambda name: rows[direction, name]["peak_gb"])
                del left[largest]
                message = f"in turns with {len(left)} others: {str(error).split('. ')[0]}"
                rows[direction, largest] |= {"status": "out of memory", "detail": message}
            release_memory(self._options.device)
        return {}

    def _check_and_weigh(
        self, name: str, function: Callable[..., Tensor], gate: Gate, case: Case, backward: bool
    ) -> dict[str, Any]:
        """Status, errors, time of the first call and peak memory of a variant.

        Raises:
            Whatever the variant raises.
        """
        options = self._options
        arithmetic = arithmetic_of(name, options.dtype)
        faults: list[str] = []
        first_call = 0.0
        if COMPILED not in name:
            faults, first_call = self._faults_when_short(name, function, case, backward)
        probed, seconds = _timed_run(function, gate.probe, options.device)
        first_call += seconds
        faults += gate.faults_at_spots(probed, arithmetic)
        fields: dict[str, Any] = {f"error_{tensor}": error for tensor, error in gate.errors(probed).items()}
        del probed
        with track_peak(options.device) as peak:
            results = gate.inputs.run(function)
        faults += gate.faults_beside_pytorch(results, arithmetic)
        return fields | {
            "status": "wrong result" if faults else "ok",
            "detail": "; ".join(faults),
            "peak_gb": peak.extra_bytes / GB,
            "first_call_s": first_call,
            "implementation": implementation_of(name, gate.inputs),
        }

    def _faults_when_short(
        self, name: str, function: Callable[..., Tensor], case: Case, backward: bool
    ) -> tuple[list[str], float]:
        """What float64 finds on every row of a case short enough for that, asked once per kernel and head_dim; and
        the seconds of the call, if there was one.

        Not for compiled variants: another shape would be another compilation.
        """
        key = (name, case.head_dim, backward)
        seconds = 0.0
        if max(case.num_queries, case.num_keys) <= FULL_CHECK_LENGTH:
            self._checked[key] = []  # the gate of this very case looks at every row
        elif key not in self._checked:
            short = replace(
                case,
                num_queries=min(case.num_queries, FULL_CHECK_LENGTH),
                num_keys=min(case.num_keys, FULL_CHECK_LENGTH),
            )
            gate = Gate(make_inputs(short, self._options, backward=backward))
            probed, seconds = _timed_run(function, gate.probe, self._options.device)
            faults = gate.faults_at_spots(probed, arithmetic_of(name, self._options.dtype))
            self._checked[key] = [f"at {short.num_queries}:{short.num_keys}, {fault}" for fault in faults]
        return list(self._checked[key]), seconds

    def _refusal(self, name: str, case: Case, direction: str) -> dict[str, Any] | None:
        """Status and detail of a variant that is not even tried; None: try it."""
        options = self._options
        flops_before, ms_before = self._calls.get((name, case.head_dim, direction), (0.0, 0.0))
        if flops_before:
            seconds = ms_before * 1e-3 * case.flops(options, direction) / flops_before
            if seconds > max(options.longest_call_seconds, ms_before * 1e-3):
                limit = options.longest_call_seconds
                return {
                    "status": "skipped",
                    "detail": f"about {seconds:.2g} s a call, longest_call_seconds is {limit:g}",
                }
        # On a CPU nothing raises: Linux kills the process instead. So ask first, for kernels that hold all scores.
        free = available_memory() if not options.device.startswith("cuda") else None
        if free is None or name.removesuffix(COMPILED) not in KEEP_SCORES:
            return None
        scores = options.batch * options.heads * case.num_queries * case.num_keys
        needed = SCORE_COPIES * scores * DTYPES[options.dtype].itemsize
        if needed <= 0.8 * free:
            return None
        return {
            "status": "out of memory",
            "detail": f"needs {needed / GB:.1f} GB, {free / GB:.1f} GB free",
        }

    def longest_that_fit(self, rows: Rows) -> Rows:
        """For each kernel that ran out of the GPU's memory in a square tier: the longest forward pass that fits."""
        if not self._options.device.startswith("cuda"):
            return []
        found = []
        forward = [
            row
            for row in rows
            if row["part"] == "tiers"
            and row["direction"] == "forward"
            and row["num_queries"] == row["num_keys"]
        ]
        for name in dict.fromkeys(row["kernel"] for row in forward if COMPILED not in row["kernel"]):
            mine = [row for row in forward if row["kernel"] == name]
            too_long = min((row["num_keys"] for row in mine if row["status"] == "out of memory"), default=0)
            fits = max((row["num_keys"] for row in mine if row["status"] == "ok"), default=0)
            if fits and too_long:
                found.append(self._longest_between(name, fits, too_long))
        return found

    def _longest_between(self, name: str, fits: int, too_long: int) -> dict[str, Any]:
        options = self._options
        function = build_variant(name, options.dtype)
        peak_gb = 0.0
        while too_long - fits > MEMORY_STEP:
            length = (fits + too_long) // 2 // MEMORY_STEP * MEMORY_STEP
            case = Case("memory limit", str(length), length, length, options.head_dim)
            try:
                inputs = make_inputs(case, options, backward=False)
                with track_peak(options.device) as peak:
                    run_attention(function, inputs.q, inputs.k, inputs.v, None, causal=inputs.causal)
                fits, peak_gb = length, peak.extra_bytes / GB
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                too_long = length
            release_memory(options.device)
        return {
            **asdict(Case("memory limit", str(fits), fits, fits, options.head_dim)),
            "direction": "forward",
            "kernel": name,
            **_shared_fields(options),
            "precision": precision_of(name, options.dtype),
            "status": "longest that fits",
            "detail": f"{too_long} tokens do not",
            "peak_gb": peak_gb or None,
        }


def _shared_fields(options: AttentionOptions) -> dict[str, Any]:
    return {
        "batch": options.batch,
        "heads": options.heads,
        "kv_heads": options.kv_heads,
        "causal": options.causal,
        "dtype": options.dtype,
        "layout": "projection" if options.projection_layout else "contiguous",
        "data": options.data,
    }


@contextmanager
def _matmul_precision(dtype: str) -> Iterator[None]:
    # Not `matmul.fp32_precision`: torch refuses to compile where that and the older switch disagree.
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _timed_run(
    function: Callable[..., Tensor], inputs: Inputs, device: str
) -> tuple[tuple[Tensor, ...], float]:
    """Results and seconds, the device's work included."""
    began = time.perf_counter()
    results = inputs.run(function)
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return results, time.perf_counter() - began
