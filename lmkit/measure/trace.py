"""A recording of any engine: ranges and CUDA calls of CPU threads, work of devices. Times are in ns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Range:
    """A named stretch of one thread's time (NVTX push/pop, record_function)."""

    name: str
    start: int
    end: int
    process: int
    thread: int


@dataclass(frozen=True)
class Call:
    """A call of the CUDA runtime or driver; `correlation` links it to the work it caused."""

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


@dataclass(frozen=True)
class DeviceWork:
    """A kernel, memcpy or memset on a device. `from_graph`: launched by a CUDA graph, not by a call of its own."""

    kind: str
    name: str
    start: int
    end: int
    process: int
    device: int
    correlation: int
    from_graph: bool = False

    @property
    def is_communication(self) -> bool:
        return "nccl" in self.name.lower()


@dataclass(frozen=True)
class Trace:
    """One recording. `calls` and `work` are None where no GPU was traced.

    Attributes:
        engine: "nsys" or "kineto".
        source: name of the file or of what was run; no folders.
        ops: CPU operators (kineto only): name -> (calls, self time in ns).
        undisturbed_ms: median of a step (or pass) without the profiler; None if not measured.
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
