"""Summarize the rows of traces and memory profiles for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmkit.bench.summary import Summary
from lmkit.measure.tables import Column, Rows
from lmkit.profile.summary import FACTS, named_table, range_table

CATEGORIES = ("parameters", "gradients", "optimizer state", "activations", "temporary")
BUILD, WHOLE_RUN = "build", "whole run"


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


def most_computed(rows: Rows) -> float:
    """Return the most GiB of activations and temporary tensors at the peak of a phase of the steps.

    The peak of the whole run may lie in the optimizer's phase, where they are gone.
    """
    return max(
        row["activations_gib"] + row["temporary_gib"]
        for row in rows
        if row["phase"] not in (BUILD, WHOLE_RUN)
    )
