"""torch.profiler (kineto): record steps in this process, or read a chrome trace of it."""

from __future__ import annotations

import gzip
import json
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lmkit.errors import UsageError
from lmkit.measure.ranges import disable_ranges, enable_ranges, quietly
from lmkit.measure.statistics import median
from lmkit.measure.timing import clock_for
from lmkit.profile.trace import Call, DeviceWork, Range, Trace

_RANGES_OF_TORCH = ("ProfilerStep", "Optimizer.")
_MOST_BYTES = 2 << 30  # of a trace, unpacked: minutes of training; a packed file could claim any size
_BLOCK_BYTES = 1 << 24
_MOST_NS = 1 << 63
_NOT_A_TRACE = (
    KeyError, TypeError, AttributeError, EOFError, zlib.error, ValueError, OverflowError, RecursionError,
)  # fmt: skip
_WHAT_IS_READ = (
    "give the kineto_trace.json.gz of `lmkit profile kineto RECIPE`, or what torch.profiler's "
    "export_chrome_trace wrote"
)
_WORK_KINDS = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
# Triton launches through the driver, PyTorch through the runtime: both count.
_CALL_CATEGORIES = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True)
class KinetoRun:
    """A recording, and its chrome trace (JSON bytes, for Perfetto)."""

    trace: Trace
    chrome_trace: bytes


def profile_work(
    work: Callable[[], object], *, steps: int, warmup: int, device: torch.device | str, source: str
) -> KinetoRun:
    """Run `work` `warmup` times, `steps` times under a clock, and `steps` times recorded with lmkit's ranges on.

    The clock shows what the profiler adds: it slows every operation of the CPU, so that a GPU looks idle. `work`
    marks its own ranges; a "step" (or "pass") range around one call makes the summary's window.
    """
    on_gpu = torch.device(device).type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    for _ in range(warmup):
        work()
    clock = clock_for(device, "wall")
    undisturbed_ms = median([clock.sample_ms(work, 1, before=()) for _ in range(steps)])
    enable_ranges("kineto")
    try:
        # acc_events avoids a warning of older versions of torch; with one cycle it changes nothing else.
        with quietly(torch.profiler.profile(activities=activities, acc_events=True)) as profiler:
            for _ in range(steps):
                work()
            _synchronize(device)
    finally:
        disable_ranges()
    with tempfile.TemporaryDirectory(prefix="lmkit-kineto-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        content = path.read_bytes()
    trace = parse_chrome_trace(json.loads(content), source)
    return KinetoRun(replace(trace, undisturbed_ms=undisturbed_ms), content)


def _synchronize(device: torch.device | str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def read_chrome_trace(path: Path) -> Trace:
    """Read a `.json` or `.json.gz` file of torch.profiler.

    Raises:
        UsageError: missing, or not such a file.
    """
    if not path.is_file():
        raise UsageError("trace.missing", f"{path}: no such file", hint=_WHAT_IS_READ)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = bytearray()
            while len(content) <= _MOST_BYTES and (
                block := file.read(_BLOCK_BYTES)
            ):  # one read takes all at once
                content += block
        if len(content) > _MOST_BYTES:
            raise UsageError(
                "trace.too_large", f"{path}: more than {_MOST_BYTES >> 20} MiB of JSON", hint=_WHAT_IS_READ
            )
        return parse_chrome_trace(json.loads(content), path.name)
    except OSError as error:  # gzip says so of what is not compressed
        raise UsageError("trace.damaged", f"{path}: cannot be read: {error}", hint=_WHAT_IS_READ) from error
    except _NOT_A_TRACE as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise UsageError(
            "trace.damaged", f"{path}: not a trace of torch.profiler ({what})", hint=_WHAT_IS_READ
        ) from error


def parse_chrome_trace(document: dict[str, Any], source: str) -> Trace:
    """Turn a chrome trace into a `Trace`. Chrome's times are in us with fractions; ours are in whole ns.

    Raises:
        KeyError: no `traceEvents`, or an event lacks something.
        TypeError, ValueError, OverflowError: something is of another type, or no time.
    """
    ranges: list[Range] = []
    calls: list[Call] = []
    work: list[DeviceWork] = []
    operators: dict[tuple[int, int], list[tuple[int, int, str]]] = defaultdict(list)
    # Device events carry the device as their process; their launching process is the trace's own.
    host = next(
        (_key(e["pid"]) for e in document["traceEvents"] if e.get("cat") in ("user_annotation", "cpu_op")), 0
    )
    for event in document["traceEvents"]:
        if event.get("ph") != "X":
            continue
        category, name = event.get("cat"), _name(event["name"])
        start = _ns(event["ts"])
        end = start + _ns(event["dur"])
        if end < start:
            raise ValueError(f"{name} lasts {event['dur']} us")
        arguments = event.get("args", {})
        if category == "user_annotation":
            ranges.append(Range(name, start, end, host, _key(event["tid"])))
        elif category == "cpu_op":
            operators[_key(event["pid"]), _key(event["tid"])].append((start, end, name))
        elif category in _CALL_CATEGORIES:
            correlation = _key(arguments.get("correlation", 0))
            calls.append(Call(name, start, end, host, _key(event["tid"]), correlation))
        elif category in _WORK_KINDS:
            kind = _WORK_KINDS[category]
            label = name if kind == "kernel" else kind
            device, correlation = _key(arguments.get("device", 0)), _key(arguments.get("correlation", 0))
            in_graph = bool(arguments.get("graph node id"))
            work.append(DeviceWork(label, kind, start, end, host, device, correlation, in_graph))
    recorded_gpu = bool(calls or work)
    notes = () if recorded_gpu else ("nothing ran on a GPU while it was traced",)
    return Trace(
        engine="kineto",
        source=source,
        ranges=[entry for entry in ranges if not entry.name.startswith(_RANGES_OF_TORCH)],
        calls=calls if recorded_gpu else None,
        work=work if recorded_gpu else None,
        ops=_self_times(operators.values()),
        notes=notes,
    )


def _ns(us: float) -> int:
    ns = round(us * 1000)
    if abs(ns) >= _MOST_NS:
        raise ValueError(f"{us} us is no time")
    return ns


def _name(value: str) -> str:
    """Check that a name can be written; half a surrogate pair raises ValueError."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no name")
    value.encode()
    return value


def _key(value: int) -> int:
    """Check a process, thread, device or correlation. They are numbers, but some threads have names."""
    if not isinstance(value, int | str):
        raise TypeError(f"{value!r} is no number")
    return value


def _self_times(threads: Any) -> dict[str, tuple[int, int]]:
    """Return name -> (calls, ns in the operator itself, without the operators it calls), over all threads."""
    calls: dict[str, int] = defaultdict(int)
    spent: dict[str, int] = defaultdict(int)
    for operators in threads:
        stack: list[tuple[int, str]] = []  # (end, name) of the operators that are open
        for start, end, name in sorted(operators, key=lambda entry: (entry[0], -entry[1])):
            while stack and stack[-1][0] <= start:
                stack.pop()
            if stack:
                spent[stack[-1][1]] -= end - start
            calls[name] += 1
            spent[name] += end - start
            stack.append((end, name))
    return {name: (calls[name], spent[name]) for name in calls}
