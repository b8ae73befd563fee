"""torch.profiler (kineto): record steps in this process, or read a chrome trace of it."""

from __future__ import annotations

import gzip
import json
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lmkit.errors import UsageError
from lmkit.measure.ranges import disable_ranges, enable_ranges, quietly
from lmkit.measure.statistics import median
from lmkit.measure.timing import clock_for
from lmkit.measure.trace import Call, DeviceWork, Range, Trace
from lmkit.storage.inputs import open_input

_RANGES_OF_TORCH = ("ProfilerStep", "Optimizer.")
_MOST_NS = 1 << 63
_NOT_A_TRACE = (
    KeyError, TypeError, AttributeError, EOFError, zlib.error, ValueError, OverflowError, RecursionError,
)  # fmt: skip
_HINT = (
    "give the kineto_trace.json.gz of `lmkit profile kineto RECIPE`, or what torch.profiler's "
    "export_chrome_trace wrote"
)
_WORK_KINDS = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
# Triton launches through the driver, PyTorch through the runtime: both count.
_CALL_CATEGORIES = ("cuda_runtime", "cuda_driver")


def profile_work(
    work: Callable[[], object],
    *,
    steps: int,
    warmup: int,
    device: torch.device,
    source: str,
    ranges: bool = True,
) -> tuple[Trace, bytes]:
    """Run `work` `warmup` times, `steps` times under a clock, and `steps` times recorded.

    The clock shows what the profiler adds: it slows every operation of the CPU, so that a GPU looks idle. `work`
    marks its own ranges; a "step" (or "pass") range around one call makes the summary's window.

    Args:
        ranges: record lmkit's ranges; code that torch compiled without them is compiled again.

    Returns:
        The recording, and its chrome trace (JSON, for Perfetto).
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    for _ in range(warmup):
        work()
    clock = clock_for(device, "wall")
    undisturbed_ms = median([clock.sample_ms(work, 1, before=()) for _ in range(steps)])
    if ranges:
        enable_ranges("kineto")
    try:
        # acc_events avoids a warning of older versions of torch; with one cycle it changes nothing else.
        with quietly(torch.profiler.profile(activities=activities, acc_events=True)) as profiler:
            for _ in range(steps):
                work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    finally:
        disable_ranges()
    content = chrome_trace(profiler)
    return replace(parse_chrome_trace(json.loads(content), source), undisturbed_ms=undisturbed_ms), content


def chrome_trace(profiler: torch.profiler.profile) -> bytes:
    """Return what the profiler recorded, as JSON."""
    with tempfile.TemporaryDirectory(prefix="lmkit-profile-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return path.read_bytes()


def read_chrome_trace(path: Path) -> Trace:
    """Read a `.json` or `.json.gz` file of torch.profiler.

    Raises:
        UsageError: missing, too large, or not such a file.
    """
    if not path.is_file():
        raise UsageError("trace.missing", f"{path}: no such file", hint=_HINT)
    try:
        with open_input(path) as raw, gzip.open(raw) if path.suffix == ".gz" else raw as file:
            return parse_chrome_trace(json.loads(file.read()), path.name)
    except OSError as error:  # gzip says so of what is not compressed
        raise UsageError("trace.damaged", f"{path}: cannot be read: {error}", hint=_HINT) from error
    except _NOT_A_TRACE as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        not_a_trace = f"{path}: not a trace of torch.profiler ({what})"
        raise UsageError("trace.damaged", not_a_trace, hint=_HINT) from error


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
    events = [event for event in document["traceEvents"] if event.get("ph") == "X"]
    # Device events carry the device as their process; their launching process is the trace's own.
    own = ("user_annotation", "cpu_op")
    host = next((_key(event["pid"]) for event in events if event.get("cat") in own), 0)
    for event in events:
        category, name = event.get("cat"), event["name"]
        name.encode()  # half a surrogate pair cannot be written
        start = _ns(event["ts"])
        end = start + _ns(event["dur"])
        if end < start:
            raise ValueError(f"{name} lasts {event['dur']} us")
        arguments = event.get("args", {})
        if category == "user_annotation" and not name.startswith(_RANGES_OF_TORCH):
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
            work.append(DeviceWork(kind, label, start, end, host, device, correlation, in_graph))
    on_gpu = bool(calls or work)
    return Trace(
        engine="kineto",
        source=source,
        ranges=ranges,
        calls=calls if on_gpu else None,
        work=work if on_gpu else None,
        ops=_self_times(operators.values()),
        notes=() if on_gpu else ("nothing ran on a GPU while it was traced",),
    )


def _ns(us: float) -> int:
    ns = round(us * 1000)
    if abs(ns) >= _MOST_NS:
        raise ValueError(f"{us} us is not a time")
    return ns


def _key(value: int) -> int:
    """Check a process, thread, device or correlation. They are numbers, but some threads have names."""
    if not isinstance(value, int | str):
        raise TypeError(f"{value!r} is not a number")
    return value


def _self_times(threads: Iterable[list[tuple[int, int, str]]]) -> dict[str, tuple[int, int]]:
    """Return name -> (calls, ns in the operator itself, without the operators it calls), over all threads."""
    calls: dict[str, int] = defaultdict(int)
    spent: dict[str, int] = defaultdict(int)
    for operators in threads:
        open_: list[tuple[int, str]] = []  # (end, name)
        for start, end, name in sorted(operators, key=lambda entry: (entry[0], -entry[1])):
            while open_ and open_[-1][0] <= start:
                open_.pop()
            if open_:
                spent[open_[-1][1]] -= end - start
            calls[name] += 1
            spent[name] += end - start
            open_.append((end, name))
    return {name: (calls[name], spent[name]) for name in calls}
