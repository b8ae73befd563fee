"""Reduce a recording to its summary: launches, GPU busy and idle share, CPU dispatch against GPU work per range.

The CPU's time in CUDA calls has two parts: calls that give the GPU work (dispatch), and calls that wait for it
(synchronizations, blocking copies). A step that dispatches all the time is bound by the CPU; a step that waits is
bound by the GPU.
"""

from __future__ import annotations

import bisect
import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from lmkit.bench.summary import Summary, terminal_text
from lmkit.measure.statistics import clip, median, overlap, total
from lmkit.measure.tables import TERMINAL_WIDTH, Column, Row, Rows, markdown_table, terminal_table
from lmkit.measure.trace import Call, DeviceWork, Range, Trace

STEP, FORWARD = "step", "forward"
WINDOW_RANGES = (STEP, "pass", "fwd+bwd", FORWARD)
"""The window counts the first of these that was recorded."""
# The autograd engine launches backward's kernels from its own thread, so these ranges own what any thread of their
# process launches while they are open. All others own the launches of their thread only.
ANY_THREAD = frozenset({STEP, "pass", "backward", "fwd+bwd"})
TOP = 15
NS_PER_MS = 1e6

RANGE_COLUMNS = (
    Column("name", "range"),
    Column("instances", "count", "d"),
    Column("wall_ms", "wall ms", ".3f"),
    Column("dispatch_ms", "dispatch ms", ".3f"),
    Column("dispatch_share", "dispatch", ".1%"),
    Column("wait_ms", "waiting ms", ".3f"),
    Column("gpu_ms", "GPU ms", ".3f"),
    Column("launches", "launches", ".0f"),
)
NAMED_COLUMNS = (
    Column("name", "name"),
    Column("calls", "calls", "d"),
    Column("total_ms", "ms", ".3f"),
    Column("share", "share", ".1%"),
)
FACTS = {
    "undisturbed_ms": ("one of them without the profiler (ms)", ".2f"),
    "launches": ("kernel launches in the window", "d"),
    "kernels": ("kernels recorded in the window", "d"),
    "launches_per_forward": ("launches per forward", ".0f"),
    "launches_per_step": ("launches per step", ".0f"),
    "gpu_busy_share": ("GPU busy", ".1%"),
    "gpu_idle_share": ("GPU idle", ".1%"),
    "undisturbed_gpu_share": ("GPU work / time without the profiler", ".1%"),
    "dispatch_share": ("CPU dispatching", ".1%"),
    "wait_share": ("CPU waiting for the GPU", ".1%"),
    "communication_ms": ("communication kernels (ms)", ".3f"),
    "communication_overlap_share": ("communication while compute runs", ".1%"),
}
"""Key of a summary -> its label and format."""


def short_name(kernel: str) -> str:
    """Return at most 60 characters of a kernel's name, without the C++ namespaces that all of PyTorch's share."""
    return re.sub(r"^void |at::native::|\(anonymous namespace\)::", "", kernel)[:60]


def base_name(name: str) -> str:
    """ "lmkit.step" and "step" are the same range ("Optimizer.step#AdamW.step", torch's own, is not)."""
    return name.removeprefix("lmkit.")


def summarize(trace: Trace, *, skip_steps: int = 1) -> dict[str, Any]:
    """Reduce a recording to its summary, in JSON types.

    The window is from the start of the first counted step to the end of the last; without step ranges it covers the
    passes, without those everything. Shares are of the window; device shares are means over the devices. Values are
    None where the recording has no such table (a CPU, an old nsys).

    Args:
        skip_steps: steps at the start that do not count (compilation, allocator, caches), if more were recorded.

    Returns:
        steps: ranges of the window: steps, or passes (see `window`).
        undisturbed_ms: time of one of them without the profiler; its GPU work fills `undisturbed_gpu_share` of that.
        ranges: for every name, medians over its instances: `wall_ms` on the CPU, `dispatch_ms` and `wait_ms` (union
            of its CUDA calls of either kind), `gpu_ms` (union of the device work that its calls caused, whenever it
            ran).
        top_kernels, top_ops: device time of kernels, self time of CPU operators; shares are of the total of their
            kind.
        The others are those of `FACTS`.
    """
    counted = _counted(trace.ranges, skip_steps)
    start, end, window = _window(trace, counted)
    calls = None if trace.calls is None else [call for call in trace.calls if start <= call.start < end]
    lost = bool(counted and trace.calls and not calls)
    if lost:
        # An nsys older than the driver records only the beginning: the calls are unknown, not zero.
        calls = None
    caused = set(map(_cause, calls or ()))
    work = None
    if trace.work is not None and not lost:
        # Work that the window's calls caused may run a little later; count it, too.
        work = [item for item in trace.work if start <= item.start < end or _cause(item) in caused]
    waits = _waits(calls or (), work or ())
    inside = [entry for entry in trace.ranges if start <= entry.start and entry.end <= end]
    ranges = _summarize_ranges(inside, calls, waits, work)
    by_base = {base_name(entry["name"]): entry for entry in ranges}
    busy = None if lost or not trace.work else _mean_share(trace.work, lambda item: item.device, start, end)
    dispatch_share = wait_share = None
    if calls is not None:
        dispatches = [call for call in calls if call not in waits]
        dispatch_share = _mean_share(dispatches, lambda call: call.process, start, end)
        wait_share = _mean_share(waits, lambda call: call.process, start, end)
    undisturbed_share, slowdown = None, 1.0
    if trace.undisturbed_ms is not None and counted:
        gpu_ms = by_base[base_name(counted[0].name)]["gpu_ms"]
        undisturbed_share = None if gpu_ms is None else gpu_ms / trace.undisturbed_ms
        recorded_ms = median([(entry.end - entry.start) / NS_PER_MS for entry in counted])
        slowdown = recorded_ms / trace.undisturbed_ms
    communication_ms, overlap_share = _communication(work)
    spent: dict[str, tuple[int, int]] = {}  # name -> (calls, ns)
    for item in work or ():
        count, duration = spent.get(item.name, (0, 0))
        spent[item.name] = (count + 1, duration + item.end - item.start)
    return {
        "engine": trace.engine,
        "source": trace.source,
        "window": window,
        "window_ms": (end - start) / NS_PER_MS,
        "undisturbed_ms": trace.undisturbed_ms,
        "steps": len(counted),
        "launches": None if calls is None else sum(call.is_launch for call in calls),
        "kernels": None if work is None else sum(item.kind == "kernel" for item in work),
        "launches_per_forward": by_base.get(FORWARD, {}).get("launches"),
        "launches_per_step": by_base.get(STEP, {}).get("launches"),
        "gpu_busy_share": busy,
        "gpu_idle_share": None if busy is None else 1.0 - busy,
        "undisturbed_gpu_share": undisturbed_share,
        "dispatch_share": dispatch_share,
        "wait_share": wait_share,
        "communication_ms": communication_ms,
        "communication_overlap_share": overlap_share,
        "ranges": ranges,
        "top_kernels": _largest(spent),
        "top_ops": _largest(trace.ops),
        "warnings": [*trace.notes, *_warnings(trace, window if lost else "", slowdown)],
    }


def _cause(item: Call | DeviceWork) -> tuple[int, int]:
    """Return the process and the correlation, which link a call to the work that it causes."""
    return item.process, item.correlation


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


def _window(trace: Trace, counted: Sequence[Range]) -> tuple[int, int, str]:
    if counted:
        what = f"{len(counted)} x {base_name(counted[0].name)}"
        return counted[0].start, max(entry.end for entry in counted), what
    everything: list[Range | Call | DeviceWork] = [*trace.ranges, *(trace.calls or ()), *(trace.work or ())]
    if not everything:
        return 0, 0, "nothing recorded"
    start, end = min(entry.start for entry in everything), max(entry.end for entry in everything)
    return start, end + 1, "everything"


def _waits(calls: Iterable[Call], work: Iterable[DeviceWork]) -> set[Call]:
    """Return the calls that return only when the GPU has finished: synchronizations, and copies that ended before
    their call did."""
    copied: dict[tuple[int, int], int] = {}  # cause -> end of its first copy
    for item in work:
        if item.kind == "memcpy":
            copied[_cause(item)] = min(item.end, copied.get(_cause(item), item.end))
    return {
        call
        for call in calls
        if "Synchronize" in call.name
        or ("emcpy" in call.name and copied.get(_cause(call), call.end + 1) <= call.end)
    }


def _summarize_ranges(
    ranges: Sequence[Range], calls: Sequence[Call] | None, waits: set[Call], work: Sequence[DeviceWork] | None
) -> Rows:
    """Return one entry per name, in the order of first appearance."""
    calls_of: dict[int, list[Call]] = defaultdict(list)
    for call in sorted(calls or (), key=lambda call: call.start):
        calls_of[call.process].append(call)
    starts = {process: [call.start for call in of] for process, of in calls_of.items()}
    work_of: dict[tuple[int, int], list[DeviceWork]] = defaultdict(list)
    for item in work or ():
        work_of[_cause(item)].append(item)

    instances: dict[str, list[tuple[float, ...]]] = {}
    for entry in sorted(ranges, key=lambda entry: entry.start):
        of_process = starts.get(entry.process, [])
        first, last = (bisect.bisect_left(of_process, moment) for moment in (entry.start, entry.end))
        any_thread = base_name(entry.name) in ANY_THREAD
        during = calls_of[entry.process][first:last]
        own = [call for call in during if any_thread or call.thread == entry.thread]
        caused = [item for call in own for item in work_of.get(_cause(call), ())]
        values = (
            (entry.end - entry.start) / NS_PER_MS,
            _total_ms(call for call in own if call not in waits),
            _total_ms(call for call in own if call in waits),
            _total_ms(caused),
            sum(call.is_launch for call in own),
        )
        instances.setdefault(entry.name, []).append(values)
    found = []
    for name, of_name in instances.items():
        wall, dispatch, wait, gpu, launches = map(median, zip(*of_name, strict=True))
        found.append(
            {
                "name": name,
                "instances": len(of_name),
                "wall_ms": wall,
                "dispatch_ms": None if calls is None else dispatch,
                "dispatch_share": None if calls is None or not wall else dispatch / wall,
                "wait_ms": None if calls is None else wait,
                "gpu_ms": None if calls is None or work is None else gpu,
                "launches": None if calls is None else launches,
            }
        )
    return found


def _total_ms(items: Iterable[Call | DeviceWork]) -> float:
    return total((item.start, item.end) for item in items) / NS_PER_MS


def _mean_share(items: Iterable[Any], group: Callable[[Any], int], start: int, end: int) -> float | None:
    """Return the mean over the groups (devices, processes) of the share of the window that their items cover."""
    if end <= start:
        return None
    intervals: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for item in items:
        intervals[group(item)].append((item.start, item.end))
    return fmean([total(clip(own, start, end)) / (end - start) for own in intervals.values()] or [0.0])


def _communication(work: Sequence[DeviceWork] | None) -> tuple[float | None, float | None]:
    """Return (ms of communication kernels over all devices, share of it with compute on the same device)."""
    if work is None:
        return None, None
    communication: dict[int, list[tuple[int, int]]] = defaultdict(list)
    compute: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for item in work:
        of_kind = communication if "nccl" in item.name.lower() else compute
        of_kind[item.device].append((item.start, item.end))
    spent = sum(total(intervals) for intervals in communication.values())
    if not spent:
        return 0.0, None
    hidden = sum(overlap(intervals, compute[device]) for device, intervals in communication.items())
    return spent / NS_PER_MS, hidden / spent


def _largest(spent: Mapping[str, tuple[int, int]]) -> Rows:
    everything = sum(duration for _, duration in spent.values()) or 1
    ordered = sorted(spent.items(), key=lambda entry: (-entry[1][1], entry[0]))[:TOP]
    return [
        {"name": name, "calls": calls, "total_ms": duration / NS_PER_MS, "share": duration / everything}
        for name, (calls, duration) in ordered
    ]


def _warnings(trace: Trace, lost_window: str, slowdown: float) -> list[str]:
    """Warn where a recording contradicts itself (an nsys older than the driver loses kernels silently), and where
    the profiler lengthens the median step by a tenth or more."""
    found = []
    if trace.calls is not None and trace.work is not None:
        launches = sum(call.is_launch for call in trace.calls)
        kernels = sum(item.kind == "kernel" and not item.from_graph for item in trace.work)
        if abs(launches - kernels) > 0.01 * max(launches, kernels):
            found.append(
                f"{launches} kernel launches but {kernels} recorded kernels: the profiler lost events (is it older "
                "than the driver?); GPU times are too low"
            )
        if lost_window:
            found.append(
                f"no CUDA call was recorded in the window ({lost_window}) and {len(trace.calls)} elsewhere: the "
                "profiler lost events (is it older than the driver?)"
            )
    if slowdown >= 1.1:
        gpu = ", and the GPU looks idler than it is" if trace.work else ""
        found.append(
            f"the profiler makes the work {slowdown:.2f} times as long: CPU times are too long by about that "
            f"factor{gpu}"
        )
    return found


# ---- rows of traces and memory profiles in words, for `lmkit report`

CATEGORIES = ("parameters", "gradients", "optimizer state", "activations", "temporary")
BUILD, WHOLE_RUN = "build", "whole run"


def gib_key(category: str) -> str:
    return category.replace(" ", "_") + "_gib"


MEMORY = (
    Column("phase", "phase"),
    Column("peak_gib", "peak GiB", ".4f"),
    *(Column(gib_key(category), category, ".4f") for category in CATEGORIES),
)


Table = Callable[[Any, Sequence[Column]], str]


def summarize_trace(rows: Rows, table: Table = markdown_table) -> Summary:
    """Say how many kernels a step launches and who waits for whom, from one row: the summary of a recording."""
    trace = rows[0]
    facts = [{"what": f"window ({trace['window']})", "value": f"{trace['window_ms']:.2f} ms"}]
    missing = []
    for key, (label, spec) in FACTS.items():
        if (value := trace.get(key)) is None:
            missing.append(label)
        else:
            facts.append({"what": label, "value": format(value, spec)})
    tables = {}
    if ranges := trace["ranges"]:  # without the GPU's columns of a CPU's recording
        known = {key for row in ranges for key, value in row.items() if value is not None}
        columns = [column for column in RANGE_COLUMNS if column.key in known]
        tables["Ranges: medians of one instance"] = table(ranges, columns)
    for key, title in (("top_kernels", "Kernels"), ("top_ops", "CPU operators (self time)")):
        if named := [entry | {"name": short_name(entry["name"])} for entry in trace.get(key, ())]:
            tables[title] = table(named, NAMED_COLUMNS)
    return Summary(
        f"Profile of {trace.get('source', 'a run')} ({trace['engine']})",
        (Column("what", "what"), Column("value", "value")),
        facts,
        findings=_trace_findings(trace),
        tables=tables,
        notes=[f"not recorded: {', '.join(missing)}"] if missing else [],
    )


def text_of(trace: Row) -> str:
    """Return the tables of a recording's summary for a terminal."""
    summary = summarize_trace([dict(trace)], terminal_table)
    warnings = [textwrap.fill(f"warning: {warning}", TERMINAL_WIDTH) + "\n" for warning in trace["warnings"]]
    return "\n".join([terminal_text(summary), *summary.tables.values(), *warnings])


def _trace_findings(trace: Mapping[str, Any]) -> list[str]:
    found = []
    for unit in ("step", "forward"):
        if (launches := trace[f"launches_per_{unit}"]) is not None:
            found.append(f"{launches:.0f} kernel launches per {unit}.")
    # A profiler slows the CPU down: the share that the GPU's work fills of an undisturbed step says more.
    fills, of = trace["undisturbed_gpu_share"], "the time without the profiler"
    if fills is None:
        fills, of = trace["gpu_busy_share"], "the time"
    if fills is not None:
        limit = "the GPU is the limit" if fills > 0.9 else "the GPU waits for the CPU"
        found.append(f"The GPU's work fills {fills:.1%} of {of}: {limit}.")
    if not found:
        found.append(f"{trace['window']} in {trace['window_ms']:.2f} ms.")
    return [*found, *(f"Caution: {warning}." for warning in trace["warnings"])]


def peak_row(rows: Rows) -> dict[str, Any]:
    """Return the row of the phase with the highest peak; of several the innermost, which starts last."""
    outer = ("step", "pass", WHOLE_RUN)
    return max(reversed(rows), key=lambda row: (float(row["peak_gib"]), row["phase"] not in outer))


def summarize_memory(rows: Rows) -> Summary:
    """Say when memory peaks and what its largest part is."""
    peak, finding = peak_row(rows), "Nothing was allocated."
    if whole := float(peak["peak_gib"]):
        where = "between phases" if peak["phase"] == WHOLE_RUN else f"in {peak['phase']}"
        share, largest = max((float(peak[gib_key(name)]) / whole, name) for name in CATEGORIES)
        finding = (
            f"The peak, {whole:.2f} GiB (2^30 bytes), is reached {where}; "
            f"the largest part of it is {largest}: {share:.0%}."
        )
    return Summary("Memory", MEMORY, rows, findings=(finding,))


SUMMARIES = {"profile": summarize_trace, "memory": summarize_memory}
