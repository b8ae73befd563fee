"""Summarize the rows of traces and memory profiles for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lmkit.bench.report import Results
from lmkit.bench.summary import Summary, bullets
from lmkit.measure.tables import Column, Rows, markdown_table
from lmkit.profile.allocations import BUILD, CATEGORIES, WHOLE_RUN
from lmkit.profile.summary import FACTS, named_table, range_table


def gib_key(category: str) -> str:
    """Return the row's key for the size of a category."""
    return category.replace(" ", "_") + "_gib"


MEMORY = (
    Column("phase", "phase"),
    Column("peak_gib", "peak GiB", ".4f"),
    *(Column(gib_key(category), category, ".4f") for category in CATEGORIES),
)


TRACE = (
    Column("window", "window"),
    Column("window_ms", "ms", ".2f"),
    *(Column(key, label, spec) for key, (label, spec) in FACTS.items()),
)


def summarize_trace(rows: Rows) -> Summary:
    """Say how many kernels a step launches and who waits for whom."""
    trace = rows[0]
    tables = {}
    if trace["ranges"]:
        tables["Ranges: medians of one instance"] = range_table(trace["ranges"])
    if trace["top_kernels"]:
        tables["Kernels"] = named_table(trace["top_kernels"][:8], "kernel")
    return Summary("Trace", TRACE, rows, findings=_trace_findings(trace), tables=tables)


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


def summarize_memory(rows: Rows) -> Summary:
    """Say when memory peaks and what fills it."""
    return Summary("Memory", MEMORY, rows, findings=(memory_finding(rows),))


def peak_row(rows: Rows) -> dict[str, Any]:
    """Return the row of the phase with the highest peak; of several the innermost, which starts last."""
    return max(
        reversed(rows),
        key=lambda row: (float(row["peak_gib"]), row["phase"] not in ("step", "pass", WHOLE_RUN)),
    )


def memory_finding(rows: Rows) -> str:
    """Say where the peak is and what its largest part is."""
    peak = peak_row(rows)
    if not peak["peak_gib"]:
        return "Nothing was allocated."
    where = "between phases" if peak["phase"] == WHOLE_RUN else f"in {peak['phase']}"
    share, largest = max((float(peak[gib_key(name)]) / float(peak["peak_gib"]), name) for name in CATEGORIES)
    return (
        f"The peak, {peak['peak_gib']:.2f} GiB (2^30 bytes), is reached {where}; "
        f"the largest part of it is {largest}: {share:.0%}."
    )


SUMMARIES = {"profile": summarize_trace, "memory": summarize_memory}


def side_by_side(found: Sequence[Results]) -> dict[str, str]:
    """Compare the traces with each other, and the memory profiles: heading -> Markdown."""
    traces = {_name(results): results.rows[0] for results in found if results.kind == "profile"}
    memories = {_name(results): results.rows for results in found if results.kind == "memory"}
    tables = {}
    if len(traces) > 1:
        rows = [{**row, "trace": name} for name, row in traces.items()]
        compared = Summary("", (Column("trace", "trace"), *TRACE), rows)
        tables["Traces side by side"] = markdown_table(rows, compared.filled(compared.columns))
    if len(memories) > 1:
        peaks = [{**peak_row(rows), "profile": name} for name, rows in memories.items()]
        table = markdown_table(peaks, (Column("profile", "profile"), *MEMORY))
        tables["Memory profiles side by side"] = f"{table}\n{bullets(growth(list(memories.values())))}"
    return tables


def _name(results: Results) -> str:
    return results.path.parent.as_posix()


def most_computed(rows: Rows) -> float:
    """Return the most GiB of activations and temporary tensors at the peak of a phase of the steps.

    The peak of the whole run may lie in the optimizer's phase, where they are gone.
    """
    return max(
        row["activations_gib"] + row["temporary_gib"]
        for row in rows
        if row["phase"] not in (BUILD, WHOLE_RUN)
    )


def growth(profiles: Sequence[Rows]) -> list[str]:
    """Say how what a step computes grows over the two longest contexts of each model that was profiled at several."""
    alike: dict[tuple[Any, ...], dict[int, float]] = {}
    for rows in profiles:
        first = rows[0]
        same = tuple(first.get(key) for key in ("model", "pass", "batch_size", "attention", "dtype"))
        if first.get("context_length") is not None:
            alike.setdefault(same, {})[first["context_length"]] = most_computed(rows)
    found = []
    for (model, mode, _, kernel, dtype), sizes in alike.items():
        short, long = sorted(sizes)[-2:] if len(sizes) > 1 else (0, 0)
        if sizes.get(short):
            ratio = sizes[long] / sizes[short]
            power = math.log(ratio) / math.log(long / short)
            found.append(
                f"{model}, {kernel}, {dtype}: from {short} to {long} tokens what a {mode} computes grows "
                f"{ratio:.2f} times, as the context to the power {power:.2f}."
            )
    return found
