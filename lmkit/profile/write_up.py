"""Summarize the rows of traces and memory profiles for `lmkit report`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmkit.bench.harness import Summary
from lmkit.bench.report import Results, pivot
from lmkit.measure.tables import Column, Rows, markdown_table
from lmkit.profile.allocations import memory_finding, peak_row
from lmkit.profile.summary import base_name, short_name

RANGES = (
    Column("name", "range"),
    Column("instances", "count", "d"),
    Column("wall_ms", "wall ms", ".3f"),
    Column("dispatch_ms", "CPU dispatching ms", ".3f"),
    Column("dispatch_share", "dispatch share", ".1%"),
    Column("wait_ms", "CPU waiting ms", ".3f"),
    Column("gpu_ms", "GPU ms", ".3f"),
    Column("launches", "launches", ".0f"),
)
KERNELS = (
    Column("name", "kernel"),
    Column("calls", "calls", "d"),
    Column("total_ms", "ms", ".3f"),
    Column("share", "share", ".1%"),
)
MEMORY = (
    Column("phase", "phase"),
    Column("peak_gib", "peak GiB", ".3f"),
    Column("parameters_gib", "parameters", ".3f"),
    Column("gradients_gib", "gradients", ".3f"),
    Column("optimizer_state_gib", "optimizer state", ".3f"),
    Column("activations_gib", "activations", ".3f"),
    Column("temporary_gib", "temporary", ".3f"),
)


def summarize_trace(rows: Rows) -> Summary:
    """Say how many kernels a step launches, who waits for whom, and what communication costs."""
    summary = rows[0]
    tables = {}
    if summary["ranges"]:
        tables["Ranges: medians of one instance"] = markdown_table(summary["ranges"], RANGES)
    if summary["top_kernels"]:
        kernels = [row | {"name": f"`{short_name(row['name'])}`"} for row in summary["top_kernels"][:8]]
        tables["Kernels"] = markdown_table(kernels, KERNELS)
    return Summary("Trace", (), rows, findings=tuple(trace_findings(summary)), tables=tables)


def trace_findings(summary: Mapping[str, Any]) -> list[str]:
    """Return launches, busy shares and communication, as far as they were recorded."""
    recorded = f"Recorded by {summary['engine']}: {summary['window']} in {summary['window_ms']:.2f} ms."
    found = []
    forward = summary["launches_per_forward"]
    if summary["launches_per_step"] is not None:
        of_forward = f", {forward:.0f} of them in the forward pass" if forward is not None else ""
        found.append(f"{summary['launches_per_step']:.0f} kernel launches per step{of_forward}.")
    elif forward is not None:
        found.append(f"{forward:.0f} kernel launches per forward pass.")
    busy, dispatch, waits = (summary[f"{name}_share"] for name in ("gpu_busy", "dispatch", "wait"))
    if busy is not None and dispatch is not None:
        # A profiler slows the CPU down: the share that the GPU's work fills of an undisturbed step says more.
        undisturbed = summary["undisturbed_gpu_share"]
        fills = busy if undisturbed is None else undisturbed
        bound = "the GPU is the limit" if fills > 0.9 else "the GPU waits for the CPU"
        alone = ""
        if undisturbed is not None:
            unit = summary["window"].rpartition(" ")[2]
            alone = (
                f"; without the profiler a {unit} takes {summary['undisturbed_ms']:.2f} ms, of which the GPU's work "
                f"fills {undisturbed:.1%}"
            )
        found.append(
            f"The GPU is busy {busy:.1%} of the time, the CPU dispatches {dispatch:.1%} and waits for the GPU "
            f"{waits:.1%} of the time{alone}: {bound}."
        )
    found.insert(1 if found else 0, recorded)
    if summary["communication_ms"]:
        found.append(
            f"{summary['communication_ms']:.2f} ms of communication kernels, "
            f"{summary['communication_overlap_share']:.0%} of them while compute runs."
        )
    return [*found, *(f"Caution: {warning}." for warning in summary["warnings"])]


def summarize_memory(rows: Rows) -> Summary:
    """Say when memory peaks and what fills it."""
    return Summary(
        "Memory",
        MEMORY,
        rows,
        findings=(memory_finding(rows),),
    )


SUMMARIES = {"profile": summarize_trace, "memory": summarize_memory}


def side_by_side(found: Sequence[Results]) -> dict[str, str]:
    """Compare the traces with each other, and the memory profiles: heading -> Markdown."""
    traces = {_name(results): _figures(results.rows[0]) for results in found if results.kind == "profile"}
    memories = {_name(results): results.rows for results in found if results.kind == "memory"}
    tables = {}
    if len(traces) > 1:
        most_first = sorted(traces.values(), key=len, reverse=True)
        cells = [
            {"figure": name, "trace": trace, "text": figures.get(name, "-")}
            for name in dict.fromkeys(name for figures in most_first for name in figures)
            for trace, figures in traces.items()
        ]
        tables["Traces side by side: one step or pass, ms"] = pivot(
            cells,
            lambda cell: str(cell["figure"]),
            lambda cell: str(cell["trace"]),
            lambda cell: str(cell["text"]),
            corner="figure \\ trace",
        )
    if len(memories) > 1:
        peaks = [peak_row(rows) | {"run": name} for name, rows in memories.items()]
        growth = "".join(f"\n- {finding}" for finding in growth_findings(list(memories.values())))
        tables["Memory profiles side by side"] = (
            markdown_table(peaks, (Column("run", "profile"), *MEMORY)) + growth
        )
    return tables


def _name(results: Results) -> str:
    return results.path.parent.as_posix()


def _figures(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return label -> text, as far as recorded; ranges that occur several times in a step are added up."""
    unit = summary["window"].rpartition(" ")[2]
    of_unit: dict[str, Any] = next(
        (entry for entry in summary["ranges"] if base_name(entry["name"]) == unit), {}
    )
    known = [
        ("kernel launches of a forward pass", summary["launches_per_forward"], ".0f"),
        ("kernel launches of a step", summary["launches_per_step"], ".0f"),
        ("without the profiler", summary["undisturbed_ms"], ".2f"),
        ("share of that which the GPU's work fills", summary["undisturbed_gpu_share"], ".1%"),
        ("under the profiler", of_unit.get("wall_ms"), ".2f"),
        ("GPU busy under the profiler", summary["gpu_busy_share"], ".1%"),
        ("CPU dispatching", summary["dispatch_share"], ".1%"),
        ("CPU waiting for the GPU", summary["wait_share"], ".1%"),
    ]
    for entry in summary["ranges"]:
        times = entry["instances"] / max(1, summary["steps"])
        spent = None if entry["gpu_ms"] is None else entry["gpu_ms"] * times
        name = "all" if entry is of_unit else base_name(entry["name"])
        known.append((f"GPU work: {name}", spent, ".2f"))
    return {label: format(value, spec) for label, value, spec in known if value is not None}


def growth_findings(profiles: Sequence[Rows]) -> list[str]:
    """Return what a longer context costs, where one model was profiled at several."""
    alike: dict[tuple[Any, ...], dict[int, Rows]] = {}
    for rows in profiles:
        first = rows[0]
        if first.get("context_length") is not None:
            same = tuple(first[key] for key in ("model", "pass", "batch_size", "dtype", "attention"))
            alike.setdefault(same, {})[first["context_length"]] = rows
    found = []
    for (model, mode, batch, *_), by_length in alike.items():
        short, long = min(by_length), max(by_length)
        if short == long:
            continue
        peaks = [float(peak_row(by_length[length])["peak_gib"]) for length in (short, long)]
        kept = [_kept_by_forward(by_length[length]) for length in (short, long)]
        per_token = (kept[1] - kept[0]) * 1024 / (long - short) / batch
        grows = f"from {kept[0]:.1f} to {kept[1]:.1f} GiB, {per_token:.2f} MiB per token"
        keeps = f"; what forward keeps for backward grows {grows}" if mode != "forward" else ""
        found.append(
            f"{model}, {mode}: from {short} to {long} tokens of context the peak grows from {peaks[0]:.1f} to "
            f"{peaks[1]:.1f} GiB{keeps}."
        )
    return found


def _kept_by_forward(rows: Rows) -> float:
    return max((float(row["activations_gib"]) for row in rows if row["phase"] == "forward"), default=0.0)
