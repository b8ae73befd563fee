"""A recording of any engine: ranges and CUDA calls of CPU threads, work of devices, classes of kernels. Times are in
ns. torch.profiler (kineto) records steps in this process; its chrome traces are read, too."""

from __future__ import annotations

import gzip
import json
import re
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lmkit.errors import UsageError
from lmkit.measure.ranges import disable_ranges, enable_ranges, quietly
from lmkit.measure.statistics import median
from lmkit.measure.timing import wall_clock
from lmkit.storage.inputs import open_input

if TYPE_CHECKING:
    import torch


class Range(NamedTuple):
    """A named stretch of one thread's time (NVTX push/pop, record_function)."""

    name: str
    start: int
    end: int
    process: int
    thread: int


class Call(NamedTuple):
    """A call of the CUDA runtime or driver; `correlation` links it to its work."""

    name: str
    start: int
    end: int
    process: int
    thread: int
    correlation: int

    @property
    def is_launch(self) -> bool:
        """Whether it starts exactly one kernel (a graph launch starts many)."""
        return self.name.startswith(("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchCooperativeKernel"))


class DeviceWork(NamedTuple):
    """A kernel, memcpy or memset on a device. `from_graph`: launched by a CUDA graph, not by a call of its own."""

    kind: str
    name: str
    start: int
    end: int
    process: int
    device: int
    correlation: int
    from_graph: bool = False


@dataclass(frozen=True)
class Trace:
    """One recording. `calls` and `work` are None where no GPU was traced.

    Attributes:
        source: name of the file or of what was run; no folders.
        ops: CPU operators (kineto only): name -> (calls, self time in ns).
        undisturbed_ms: median of a step (or pass) without the profiler.
        notes: warnings for the reader of the summary.
    """

    engine: str
    source: str
    ranges: Sequence[Range]
    calls: Sequence[Call] | None
    work: Sequence[DeviceWork] | None
    ops: dict[str, tuple[int, int]] = field(default_factory=dict)
    undisturbed_ms: float | None = None
    notes: tuple[str, ...] = ()


CLASSES = (
    *("matrix products", "attention forward", "attention backward", "SwiGLU, GELU", "norm", "cross-entropy"),
    *("clipping, optimizer", "casts to fp8", "RoPE", "embedding", "rest"),
)
"""In the order of tables."""
PRODUCTS, ATTENTION_FORWARD, ATTENTION_BACKWARD, ACTIVATION, NORM, LOSS, *_others = CLASSES
OPTIMIZER, CASTS, ROPE, EMBEDDING, REST = _others

# The first pattern that is found in a name counts. The compiler names a kernel after all operations that it fused.
_PATTERNS = {
    OPTIMIZER: r"adam|foreach|multi_tensor|decide_kernel",
    ATTENTION_BACKWARD: r"bprop|flash_bwd|attention.*backward|cutlassB|dkdv|dq_kernel|dot_do_o|convert_dq|"
    r"finish_kernel|prepare_kernel",
    ATTENTION_FORWARD: r"fprop|flash_fwd|attention|cutlassF|forward_kernel",
    CASTS: r"cast_rows|cast_transposed",
    PRODUCTS: r"gemm|nvjet|cutlass|cublas|xmma|splitk|triton_tem|_scaled_mm|::(add|b|baddb)?mm$|"
    r"::mkldnn_\w*linear",
    LOSS: r"softmax|nll|cross_entropy|scatter_gather|::(gather|scatter_add_?)$",
    ACTIVATION: r"silu|swiglu|gelu",
    NORM: r"rms_?norm|layer_?norm|add_norm|norm_gradient|gamma_?beta|rsqrt|vector_norm",
    ROPE: r"rope|rotary|complex",
    EMBEDDING: r"embedding|index_?select|indexing|vectorized_gather|scatter_add_kernel|sorted_sum|"
    r"compute_grad_weight|sum_and_scatter",
}


def kernel_class(name: str) -> str:
    """Return the class of a kernel, or of a CPU operator, by its name."""
    return next((kind for kind, words in _PATTERNS.items() if re.search(words, name, re.IGNORECASE)), REST)


def class_times(trace: Trace, steps: int) -> dict[str, float]:
    """Return class -> ms per step of the device's work, or of CPU operators if no GPU was traced."""
    if trace.work is None:
        spent = [(name, ns) for name, (_, ns) in trace.ops.items()]
    else:
        spent = [(item.name, item.end - item.start) for item in trace.work]
    found = dict.fromkeys(CLASSES, 0.0)
    for name, ns in spent:
        found[kernel_class(name)] += ns / 1e6 / steps
    return found


# ---- torch.profiler

_NOT_A_TRACE = (KeyError, TypeError, AttributeError, EOFError, zlib.error, ValueError, RecursionError)
_HINT = (
    "give the kineto_trace.json.gz of `lmkit profile kineto RECIPE`, or what torch.profiler's "
    "export_chrome_trace wrote"
)
_WORK_KINDS = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}


def profile_work(
    work: Callable[[], object],
    steps: int,
    *,
    warmup: int = 0,
    device: torch.device,
    source: str,
    ranges: bool = True,
) -> tuple[Trace, bytes]:
    """Run `work` `warmup` times, `steps` times under a clock, and `steps` times recorded.

    Return the recording, and its chrome trace (JSON, for Perfetto). The clock shows what the profiler adds: it slows
    every operation of the CPU, so that a GPU looks idle.

    Args:
        work: a "step" (or "pass") range around one call makes the summary's window.
        ranges: record lmkit's ranges; code that torch compiled without them is compiled again.
    """
    import torch

    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    for _ in range(warmup):
        work()
    clock = wall_clock(device)
    undisturbed_ms = median([clock.sample_ms(work, 1) for _ in range(steps)])
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
    """Read a `.json` or `.json.gz` file of torch.profiler."""
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
    """Turn a chrome trace into a `Trace`. Chrome's times are in us with fractions; ours are in whole ns."""
    ranges: list[Range] = []
    calls: list[Call] = []
    work: list[DeviceWork] = []
    operators: dict[tuple[int, int], list[tuple[int, int, str]]] = defaultdict(list)
    events = [event for event in document["traceEvents"] if event.get("ph") == "X"]
    # Device events carry the device as their process; their launching process is the trace's own.
    own = ("user_annotation", "cpu_op")
    host = next((event["pid"] for event in events if event.get("cat") in own), 0)
    for event in events:
        category, name, arguments = event.get("cat"), event["name"], event.get("args", {})
        start = round(event["ts"] * 1000)
        end = start + round(event["dur"] * 1000)
        correlation = arguments.get("correlation", 0)
        if category == "user_annotation" and not name.startswith(("ProfilerStep", "Optimizer.")):
            ranges.append(Range(name, start, end, host, event["tid"]))
        elif category == "cpu_op":
            operators[event["pid"], event["tid"]].append((start, end, name))
        elif category in ("cuda_runtime", "cuda_driver"):  # of PyTorch, of Triton
            calls.append(Call(name, start, end, host, event["tid"], correlation))
        elif category in _WORK_KINDS:
            kind = _WORK_KINDS[category]
            label, in_graph = name if kind == "kernel" else kind, bool(arguments.get("graph node id"))
            device = arguments.get("device", 0)
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
