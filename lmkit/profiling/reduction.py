"""A recording reduced to its summary: what counts, whose launches belong to which range, what takes which share."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Sequence

from lmkit.measure.statistics import clip, median, overlap, total
from lmkit.profiling.summary import NamedTime, RangeSummary, Summary
from lmkit.profiling.trace import Call, DeviceWork, Interval, Range, Trace

# Backward's kernels are launched by the autograd engine's own thread, and a step contains a backward: these ranges
# own what any thread of their process launches while they are open. All others own their thread's launches only.
ANY_THREAD = frozenset({"step", "pass", "backward", "fwd+bwd"})
STEP, FORWARD = "step", "forward"
WINDOW_RANGES = (STEP, "pass", "fwd+bwd", FORWARD)
"""What the window counts: the first of these that was recorded."""
TOP = 15
NS_PER_MS = 1e6


def summarize(trace: Trace, *, skip_steps: int = 1) -> Summary:
    """Reduce a recording to its summary.

    The window is from the start of the first step range that counts to the end of the last (without steps: of the
    forward and backward passes; without these: from the first event to the last). Shares are of the window; device
    shares are means over the devices.

    Args:
        skip_steps: so many steps at the start do not count (compilation, allocator, caches), if more were recorded.
    """
    counted = _counted(trace.ranges, skip_steps)
    start, end, window = _window(trace, counted)
    calls = None if trace.calls is None else [call for call in trace.calls if start <= call.start < end]
    lost = counted and trace.calls and not calls
    if lost:
        # An nsys older than the driver records only the beginning: nothing is known here, not nothing done.
        calls = None
    caused = None if calls is None else {(call.process, call.correlation) for call in calls}
    work = None
    if trace.work is not None and not lost:
        # What the window's calls caused may run a little later; what ran inside counts as well.
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
    """The ranges that make up the window, in order; the first `skip` of a process do not count if it has more."""
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
    """The calls that return only when the GPU has finished."""
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
    """One entry per name, in the order in which the names first appear."""
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
    """Mean over the devices of the union of their work inside the window."""
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
    """Mean over the processes of the time that some thread spends in these calls."""
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
    """(ms of communication kernels summed over devices, the share of it during which the same device computes)."""
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
    """GPU work of a step or pass per its time without the profiler. (Above 1 with several devices at work.)"""
    if trace.undisturbed_ms is None or not counted:
        return None
    work_ms = by_base[base_name(counted[0].name)].gpu_ms
    return None if work_ms is None else work_ms / trace.undisturbed_ms


def _slowed_down(trace: Trace, counted: Sequence[Range]) -> list[str]:
    """What the profiler costs, where it matters: medians of both, so that one step that was held up is no factor."""
    if trace.undisturbed_ms is None or not counted:
        return []
    factor = median([(entry.end - entry.start) / NS_PER_MS for entry in counted]) / trace.undisturbed_ms
    if factor < 1.1:
        return []
    gpu = ", and the GPU looks idler than it is" if trace.work else ""
    return [
        f"the profiler makes the work {factor:.2f} times as long: the CPU's times are too long by about that{gpu}"
    ]


def _warnings(trace: Trace, lost_window: str) -> list[str]:
    """Where the recording contradicts itself: an nsys older than the driver loses kernels, silently."""
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
