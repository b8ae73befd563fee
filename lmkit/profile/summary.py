"""Reduce a recording to its summary: launches, GPU busy and idle share, CPU dispatch against GPU work per range.

The CPU's time in CUDA calls has two parts: calls that give the GPU work (dispatch), and calls that wait for it
(synchronisations, blocking copies). A step that dispatches all the time is bound by the
CPU; a step that waits is bound by the GPU.
"""

from __future__ import annotations

import bisect
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lmkit.measure.statistics import clip, median, overlap, total
from lmkit.measure.tables import TERMINAL_WIDTH, Column, markdown_table, terminal_table
from lmkit.profile.trace import Call, DeviceWork, Interval, Range, Trace


@dataclass(frozen=True)
class RangeSummary:
    """All ranges of one name; times are medians per instance, in ms, None where the recording lacks them.

    Attributes:
        wall_ms: from its start to its end on the CPU.
        dispatch_ms: union of its CUDA calls that give the GPU work.
        wait_ms: union of its CUDA calls that wait for the GPU.
        gpu_ms: union of the device work that its calls caused, whenever it ran.
        launches: kernel launches.
    """

    name: str
    instances: int
    wall_ms: float
    dispatch_ms: float | None
    wait_ms: float | None
    gpu_ms: float | None
    launches: float | None

    @property
    def dispatch_share(self) -> float | None:
        """Dispatch per wall time: near 1 the CPU only launches."""
        return None if self.dispatch_ms is None or not self.wall_ms else self.dispatch_ms / self.wall_ms


@dataclass(frozen=True)
class NamedTime:
    """A kernel (device time) or CPU operator (self time); `share` of the total of its kind."""

    name: str
    calls: int
    total_ms: float
    share: float


@dataclass(frozen=True)
class Summary:
    """The summary of a profile. Fields are None where the recording has no such table (a CPU, an old nsys).

    `steps` counts the ranges of the window: steps, or passes (see `window`). `undisturbed_ms` is the time of one
    without the profiler, `undisturbed_gpu_share` the share of that time that its GPU work fills.
    """

    engine: str
    source: str
    window: str
    window_ms: float
    undisturbed_ms: float | None
    steps: int
    launches: int | None
    kernels: int | None
    launches_per_forward: float | None
    launches_per_step: float | None
    gpu_busy_share: float | None
    gpu_idle_share: float | None
    undisturbed_gpu_share: float | None
    dispatch_share: float | None
    wait_share: float | None
    communication_ms: float | None
    communication_overlap_share: float | None
    ranges: tuple[RangeSummary, ...]
    top_kernels: tuple[NamedTime, ...]
    top_ops: tuple[NamedTime, ...]
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as JSON types."""
        summary = asdict(self)
        for row, entry in zip(summary["ranges"], self.ranges, strict=True):
            row["dispatch_share"] = entry.dispatch_share
        return summary

    def text(self) -> str:
        """Return tables for a terminal of 100 columns."""
        return self._render(terminal_table)

    def markdown(self) -> str:
        """Return a Markdown report."""
        return f"# Profile of {self.source} ({self.engine})\n\n" + self._render(markdown_table)

    def _render(self, table: Any) -> str:
        facts = [
            {"what": label, "value": format(value, spec)}
            for label, value, spec in self._facts()
            if value is not None
        ]
        parts = [table(facts, [Column("what", "what"), Column("value", "value")])]
        missing = ", ".join(label for label, value, _ in self._facts() if value is None)
        if missing:
            parts.append(textwrap.fill(f"not recorded: {missing}", TERMINAL_WIDTH) + "\n")
        if self.ranges:
            rows = [asdict(entry) | {"dispatch_share": entry.dispatch_share} for entry in self.ranges]
            # Leave out the GPU's columns of a CPU's recording.
            known = [column for column in _RANGE_COLUMNS if any(row[column.key] is not None for row in rows)]
            parts.append(table(rows, known))
        for named, kind in ((self.top_kernels, "kernel"), (self.top_ops, "CPU operator (self time)")):
            if named:
                rows = [asdict(entry) | {"name": short_name(entry.name)} for entry in named]
                parts.append(table(rows, [Column("name", kind), *_NAMED_COLUMNS]))
        parts += [textwrap.fill(f"warning: {warning}", TERMINAL_WIDTH) + "\n" for warning in self.warnings]
        return "\n".join(parts)

    def _facts(self) -> list[tuple[str, Any, str]]:
        return [
            (f"window ({self.window})", f"{self.window_ms:.2f} ms", ""),
            ("one of them without the profiler (ms)", self.undisturbed_ms, ".2f"),
            ("kernel launches in the window", self.launches, "d"),
            ("kernels recorded in the window", self.kernels, "d"),
            ("launches per forward", self.launches_per_forward, ".0f"),
            ("launches per step", self.launches_per_step, ".0f"),
            ("GPU busy", self.gpu_busy_share, ".1%"),
            ("GPU idle", self.gpu_idle_share, ".1%"),
            ("GPU work / time without the profiler", self.undisturbed_gpu_share, ".1%"),
            ("CPU asking the GPU (dispatch)", self.dispatch_share, ".1%"),
            ("CPU waiting for the GPU", self.wait_share, ".1%"),
            ("communication kernels (ms)", self.communication_ms, ".3f"),
            ("communication beside compute", self.communication_overlap_share, ".1%"),
        ]


_RANGE_COLUMNS = (
    Column("name", "range"),
    Column("instances", "count", "d"),
    Column("wall_ms", "wall ms", ".3f"),
    Column("dispatch_ms", "dispatch ms", ".3f"),
    Column("dispatch_share", "dispatch", ".1%"),
    Column("wait_ms", "waiting ms", ".3f"),
    Column("gpu_ms", "GPU ms", ".3f"),
    Column("launches", "launches", ".0f"),
)
_NAMED_COLUMNS = (
    Column("calls", "calls", "d"),
    Column("total_ms", "ms", ".3f"),
    Column("share", "share", ".1%"),
)


def short_name(kernel: str) -> str:
    """At most 60 characters of a kernel's name, without the C++ namespaces that all of PyTorch's share."""
    return re.sub(r"^void |at::native::|\(anonymous namespace\)::", "", kernel)[:60]


# The autograd engine launches backward's kernels from its own thread, so these ranges own what any thread of their
# process launches while they are open. All others own the launches of their thread only.
ANY_THREAD = frozenset({"step", "pass", "backward", "fwd+bwd"})
STEP, FORWARD = "step", "forward"
WINDOW_RANGES = (STEP, "pass", "fwd+bwd", FORWARD)
"""The window counts the first of these that was recorded."""
TOP = 15
NS_PER_MS = 1e6


def summarize(trace: Trace, *, skip_steps: int = 1) -> Summary:
    """Reduce a recording to its summary.

    The window is from the start of the first counted step to the end of the last; without step ranges it covers the
    passes, without those everything. Shares are of the window; device shares are means over the devices.

    Args:
        skip_steps: steps at the start that do not count (compilation, allocator, caches), if more were recorded.
    """
    counted = _counted(trace.ranges, skip_steps)
    start, end, window = _window(trace, counted)
    calls = None if trace.calls is None else [call for call in trace.calls if start <= call.start < end]
    lost = counted and trace.calls and not calls
    if lost:
        # An nsys older than the driver records only the beginning: the calls are unknown, not zero.
        calls = None
    caused = None if calls is None else {(call.process, call.correlation) for call in calls}
    work = None
    if trace.work is not None and not lost:
        # Work that the window's calls caused may run a little later; count it, too.
        work = [
            item
            for item in trace.work
            if start <= item.start < end or (caused and (item.process, item.correlation) in caused)
        ]
    ranges = [entry for entry in trace.ranges if start <= entry.start and entry.end <= end]
    waits = _waits(calls, work)
    per_range = _summarize_ranges(ranges, calls, waits, work)
    by_base = {base_name(entry.name): entry for entry in per_range}
    busy = _busy_share(None if lost else trace.work, start, end)
    communication, overlapped = _communication(work)
    return Summary(
        engine=trace.engine,
        source=trace.source,
        window=window,
        window_ms=(end - start) / NS_PER_MS,
        undisturbed_ms=trace.undisturbed_ms,
        steps=len(counted),
        launches=None if calls is None else sum(call.is_launch for call in calls),
        kernels=None if work is None else sum(item.kind == "kernel" for item in work),
        launches_per_forward=by_base[FORWARD].launches if FORWARD in by_base else None,
        launches_per_step=by_base[STEP].launches if STEP in by_base else None,
        gpu_busy_share=busy,
        gpu_idle_share=None if busy is None else 1.0 - busy,
        undisturbed_gpu_share=_undisturbed_share(trace, counted, by_base),
        dispatch_share=_share_of_calls(calls, start, end, without=waits),
        wait_share=_share_of_calls(None if calls is None else waits, start, end),
        communication_ms=communication,
        communication_overlap_share=overlapped,
        ranges=tuple(per_range),
        top_kernels=_top((item.name, item.end - item.start) for item in work or ()),
        top_ops=_largest(trace.ops),
        warnings=(
            *trace.notes,
            *_warnings(trace, window if lost else ""),
            *_slowed_down(trace, counted),
        ),
    )


def base_name(name: str) -> str:
    """ "lmkit.step" and "step" are the same range ("Optimizer.step#AdamW.step", torch's own, is not)."""
    return name.removeprefix("lmkit.")


def _counted(ranges: Sequence[Range], skip: int) -> list[Range]:
    """Return the ranges of the window in order, without the first `skip` of a process that has more."""
    for unit in WINDOW_RANGES:
        of_process: dict[int, list[Range]] = defaultdict(list)
        for entry in sorted(ranges, key=lambda entry: entry.start):
            if base_name(entry.name) == unit:
                of_process[entry.process].append(entry)
        counted = [entry for own in of_process.values() for entry in (own[skip:] or own)]
        if counted:
            return sorted(counted, key=lambda entry: entry.start)
    return []


def _window(trace: Trace, steps: Sequence[Range]) -> tuple[int, int, str]:
    if steps:
        what = f"{len(steps)} x {base_name(steps[0].name)}"
        return min(step.start for step in steps), max(step.end for step in steps), what
    intervals = [(entry.start, entry.end) for entry in trace.ranges]
    intervals += [(call.start, call.end) for call in trace.calls or ()]
    intervals += [(item.start, item.end) for item in trace.work or ()]
    if not intervals:
        return 0, 0, "nothing recorded"
    return min(start for start, _ in intervals), max(end for _, end in intervals) + 1, "everything"


def _waits(calls: Sequence[Call] | None, work: Sequence[DeviceWork] | None) -> set[Call]:
    """Return the calls that return only when the GPU has finished."""
    copies: dict[tuple[int, int], list[DeviceWork]] = defaultdict(list)
    for item in work or ():
        if item.kind == "memcpy":
            copies[item.process, item.correlation].append(item)
    return {call for call in calls or () if call.waits_for(copies.get((call.process, call.correlation), ()))}


def _summarize_ranges(
    ranges: Sequence[Range],
    calls: Sequence[Call] | None,
    waits: set[Call],
    work: Sequence[DeviceWork] | None,
) -> list[RangeSummary]:
    """Return one entry per name, in the order of first appearance."""
    calls_of: dict[int, list[Call]] = defaultdict(list)
    for call in sorted(calls or (), key=lambda call: call.start):
        calls_of[call.process].append(call)
    starts = {process: [call.start for call in of] for process, of in calls_of.items()}
    work_of: dict[tuple[int, int], list[DeviceWork]] = defaultdict(list)
    for item in work or ():
        work_of[item.process, item.correlation].append(item)

    instances: dict[str, list[tuple[float, float, float, float, int]]] = {}
    for entry in sorted(ranges, key=lambda entry: entry.start):
        of_process = calls_of[entry.process]
        first = bisect.bisect_left(starts.get(entry.process, []), entry.start)
        last = bisect.bisect_left(starts.get(entry.process, []), entry.end)
        any_thread = base_name(entry.name) in ANY_THREAD
        inside = [call for call in of_process[first:last] if any_thread or call.thread == entry.thread]
        caused = [item for call in inside for item in work_of.get((call.process, call.correlation), ())]
        instances.setdefault(entry.name, []).append(
            (
                (entry.end - entry.start) / NS_PER_MS,
                total((call.start, call.end) for call in inside if call not in waits) / NS_PER_MS,
                total((call.start, call.end) for call in inside if call in waits) / NS_PER_MS,
                total((item.start, item.end) for item in caused) / NS_PER_MS,
                sum(call.is_launch for call in inside),
            )
        )
    return [
        RangeSummary(
            name=name,
            instances=len(values),
            wall_ms=median([value[0] for value in values]),
            dispatch_ms=None if calls is None else median([value[1] for value in values]),
            wait_ms=None if calls is None else median([value[2] for value in values]),
            gpu_ms=None if calls is None or work is None else median([value[3] for value in values]),
            launches=None if calls is None else median([value[4] for value in values]),
        )
        for name, values in instances.items()
    ]


def _busy_share(work: Sequence[DeviceWork] | None, start: int, end: int) -> float | None:
    """Return the mean over the devices of the share of the window that their work covers."""
    if not work or end <= start:
        return None
    by_device: dict[int, list[Interval]] = defaultdict(list)
    for item in work:
        by_device[item.device].append((item.start, item.end))
    shares = [total(clip(intervals, start, end)) / (end - start) for intervals in by_device.values()]
    return sum(shares) / len(shares)


def _share_of_calls(
    calls: Iterable[Call] | None, start: int, end: int, *, without: Iterable[Call] = ()
) -> float | None:
    """Return the mean over the processes of the share of the window that these calls cover."""
    if calls is None or end <= start:
        return None
    left_out = set(without)
    by_process: dict[int, list[Interval]] = defaultdict(list)
    for call in calls:
        if call not in left_out:
            by_process[call.process].append((call.start, call.end))
    shares = [total(clip(intervals, start, end)) / (end - start) for intervals in by_process.values()]
    return sum(shares) / len(shares) if shares else 0.0


def _communication(work: Sequence[DeviceWork] | None) -> tuple[float | None, float | None]:
    """Return (ms of communication kernels over all devices, share of it with compute on the same device)."""
    if work is None:
        return None, None
    communication: dict[int, list[Interval]] = defaultdict(list)
    compute: dict[int, list[Interval]] = defaultdict(list)
    for item in work:
        (communication if item.is_communication else compute)[item.device].append((item.start, item.end))
    spent = sum(total(intervals) for intervals in communication.values())
    if not spent:
        return 0.0, None
    beside = sum(overlap(intervals, compute[device]) for device, intervals in communication.items())
    return spent / NS_PER_MS, beside / spent


def _top(pairs: Iterable[tuple[str, int]]) -> tuple[NamedTime, ...]:
    spent: dict[str, list[int]] = defaultdict(list)
    for name, duration in pairs:
        spent[name].append(duration)
    return _largest({name: (len(durations), sum(durations)) for name, durations in spent.items()})


def _largest(spent: dict[str, tuple[int, int]]) -> tuple[NamedTime, ...]:
    everything = sum(duration for _, duration in spent.values()) or 1
    ordered = sorted(spent.items(), key=lambda entry: (-entry[1][1], entry[0]))[:TOP]
    return tuple(
        NamedTime(name, calls, duration / NS_PER_MS, duration / everything)
        for name, (calls, duration) in ordered
    )


def _undisturbed_share(
    trace: Trace, counted: Sequence[Range], by_base: dict[str, RangeSummary]
) -> float | None:
    """Return GPU work of a step or pass per its time without the profiler; above 1 with several devices."""
    if trace.undisturbed_ms is None or not counted:
        return None
    work_ms = by_base[base_name(counted[0].name)].gpu_ms
    return None if work_ms is None else work_ms / trace.undisturbed_ms


def _slowed_down(trace: Trace, counted: Sequence[Range]) -> list[str]:
    """Warn where the profiler lengthens the median step by a tenth or more."""
    if trace.undisturbed_ms is None or not counted:
        return []
    factor = median([(entry.end - entry.start) / NS_PER_MS for entry in counted]) / trace.undisturbed_ms
    if factor < 1.1:
        return []
    gpu = ", and the GPU looks idler than it is" if trace.work else ""
    return [
        f"the profiler makes the work {factor:.2f} times as long: CPU times are too long by about that factor{gpu}"
    ]


def _warnings(trace: Trace, lost_window: str) -> list[str]:
    """Warn where the recording contradicts itself: an nsys older than the driver loses kernels silently."""
    if trace.calls is None or trace.work is None:
        return []
    found = []
    launches = sum(call.is_launch for call in trace.calls)
    kernels = sum(item.kind == "kernel" and not item.from_graph for item in trace.work)
    if abs(launches - kernels) > 0.01 * max(launches, kernels):
        found.append(
            f"{launches} kernel launches but {kernels} recorded kernels: the profiler lost events (is it older than "
            "the driver?); GPU times are too low"
        )
    if lost_window:
        found.append(
            f"no CUDA call was recorded in the window ({lost_window}) and {len(trace.calls)} elsewhere: the profiler "
            "lost events (is it older than the driver?)"
        )
    return found
