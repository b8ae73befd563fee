"""The profiling write-up: where a model's time and memory go, from whole passes down to kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lmkit.bench import lm_matrix_report, model_report
from lmkit.measure.tables import Column, Rows, markdown_table
from lmkit.profile.allocations import memory_finding, peak_row
from lmkit.profile.summary import base_name, short_name
from lmkit.reports.results import Results, of_kind
from lmkit.reports.writing import Place, bullets, document, full_table, in_short, pictures, pivot, section

_RANGES = (
    Column("name", "range"),
    Column("instances", "count", "d"),
    Column("wall_ms", "wall ms", ".3f"),
    Column("dispatch_ms", "CPU asking the GPU ms", ".3f"),
    Column("dispatch_share", "dispatch share", ".1%"),
    Column("wait_ms", "CPU waiting ms", ".3f"),
    Column("gpu_ms", "GPU ms", ".3f"),
    Column("launches", "launches", ".0f"),
)
_KERNELS = (
    Column("name", "kernel"),
    Column("calls", "calls", "d"),
    Column("total_ms", "ms", ".3f"),
    Column("share", "share", ".1%"),
)
_MEMORY = (
    Column("phase", "phase"),
    Column("peak_gib", "peak GiB", ".3f"),
    Column("parameters_gib", "parameters", ".3f"),
    Column("gradients_gib", "gradients", ".3f"),
    Column("optimizer_state_gib", "optimizer state", ".3f"),
    Column("activations_gib", "activations", ".3f"),
    Column("temporary_gib", "temporary", ".3f"),
)


def write_up(found: Sequence[Results], place: Place) -> str | None:
    """The report on model benches, the lm-matrix, traces and memory profiles; None if there are none."""
    models, matrices = of_kind(found, "model"), of_kind(found, "lm-matrix")
    traces, memories = of_kind(found, "profile"), of_kind(found, "memory")
    if not (models or matrices or traces or memories):
        return None
    return document(
        "# Profiling",
        "First the stop watch, for whole passes of models; then, inside a step, how long the CPU is busy asking "
        "the GPU, how long it waits for it, and how long the GPU is busy answering: where the GPU's work fills "
        "less than the step and the CPU never waits, larger batches, compilation or CUDA graphs help more than "
        "faster kernels. Last, what the memory is full of when it is fullest.",
        *in_short(
            [
                *((_place(results), model_report.findings(results.rows)) for results in models),
                *((_place(results), lm_matrix_report.findings(results.rows)) for results in matrices),
                *((_place(results), [_headline(results.rows[0])]) for results in traces),
                *((_place(results), [memory_finding(results.rows)]) for results in _fullest(memories)),
            ]
        ),
        *(part for results in models for part in _models(results, place)),
        *(part for results in matrices for part in _matrix(results, place)),
        *_traces_compared(traces),
        *(part for results in traces for part in _trace(results, place)),
        *_memory(memories, place),
    )


def _models(results: Results, place: Place) -> list[str]:
    parts = section(results, place, f"Model passes: {_place(results)}")
    parts += bullets(model_report.findings(results.rows))
    parts += _model_tables([row for row in results.rows if row["part"] == "model"])
    parts += full_table(results, place, "model_report.md")
    study = [row for row in results.rows if row["part"] == "warm-up"]
    if study:
        parts += ["### Warm-up", markdown_table(study, model_report.WARMUP_COLUMNS)]
    return parts + pictures(results, place, "model_time", "model_memory", "model_throughput", "model_warmup")


def _model_tables(rows: Rows) -> list[str]:
    """A line per size, precision and mode, a column per context length."""
    if not rows:
        return []
    compiled = len({row["compile"] for row in rows}) > 1

    def name(row: dict[str, Any]) -> str:
        how = f", compile {row['compile']}" if compiled else ""
        return f"{row['size']}, {row['precision']}{how}"

    def passed(row: dict[str, Any]) -> str:
        if row["status"] != "ok":
            return str(row["status"])
        return f"{row['median_ms']:.2f}" + (f" ({row['mfu']:.0%})" if row.get("mfu") is not None else "")

    last = rows[-1]["mode"]  # a whole step, where it was measured: what needs most
    return [
        "Median milliseconds by context length (in brackets the MFU):",
        pivot(rows, lambda row: f"{name(row)}, {row['mode']}", _length, passed, corner="pass \\ length"),
        f"Peak GB (10^9 bytes) of {last} by context length:",
        pivot(
            [row for row in rows if row["mode"] == last],
            name,
            _length,
            lambda row: str(row["status"]) if row.get("peak_gb") is None else f"{row['peak_gb']:.2f}",
            corner="model \\ length",
        ),
    ]


def _length(row: dict[str, Any]) -> int:
    return int(row["length"])


def _matrix(results: Results, place: Place) -> list[str]:
    parts = section(results, place, f"Kernels x strategies: {_place(results)}")
    parts += bullets(lm_matrix_report.findings(results.rows))
    parts += [
        f"Median milliseconds of a step (in brackets: times as fast as {results.rows[0]['strategy']}, paired):",
        _by_strategy(results.rows, _step),
        "Peak GB (10^9 bytes) of one rank:",
        _by_strategy(results.rows, lambda row: f"{row['peak_gb']:.2f}" if row.get("peak_gb") else "-"),
        *full_table(results, place, "lm_matrix_report.md"),
    ]
    return parts + pictures(
        results, place, "lm_matrix_throughput", "lm_matrix_time", "lm_matrix_memory", "lm_matrix_convergence"
    )


def _by_strategy(rows: Rows, cell: Callable[[dict[str, Any]], str]) -> str:
    return pivot(
        rows,
        lambda row: str(row["kernel"]),
        lambda row: str(row["strategy"]),
        cell,
        corner="kernel \\ strategy",
    )


def _step(row: dict[str, Any]) -> str:
    if row["status"] != "ok":
        return str(row["status"])
    return f"{row['median_ms']:.2f}" + (f" ({row['speedup']:.2f}x)" if row.get("speedup") else "")


def _traces_compared(traces: Sequence[Results]) -> list[str]:
    """A line per figure, a column per trace: what a pass, another kernel or compilation changes."""
    if len(traces) < 2:
        return []
    figures = {_place(results): _figures(results.rows[0]) for results in traces}
    most_first = sorted(figures.values(), key=len, reverse=True)
    names = dict.fromkeys(name for found in most_first for name in found)
    cells = [
        {"figure": name, "trace": trace, "text": found.get(name, "-")}
        for name in names
        for trace, found in figures.items()
    ]
    return [
        "## Traces side by side",
        "One step or pass; time in ms, ranges that happen several times in it added up.",
        pivot(
            cells,
            lambda cell: str(cell["figure"]),
            lambda cell: str(cell["trace"]),
            lambda cell: str(cell["text"]),
            corner="figure \\ trace",
        ),
    ]


def _figures(summary: dict[str, Any]) -> dict[str, str]:
    """Label -> text, as far as recorded."""
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
        ("CPU asking the GPU", summary["dispatch_share"], ".1%"),
        ("CPU waiting for the GPU", summary["wait_share"], ".1%"),
    ]
    for entry in summary["ranges"]:
        times = entry["instances"] / max(1, summary["steps"])
        spent = None if entry["gpu_ms"] is None else entry["gpu_ms"] * times
        name = "all" if entry is of_unit else base_name(entry["name"])
        known.append((f"GPU work: {name}", spent, ".2f"))
    return {label: format(value, spec) for label, value, spec in known if value is not None}


def _trace(results: Results, place: Place) -> list[str]:
    summary = results.rows[0]
    parts = section(results, place, f"Trace: {_place(results)}")
    parts += bullets(trace_findings(summary))
    if summary["ranges"]:
        parts += ["Medians of one instance of each range:", markdown_table(summary["ranges"], _RANGES)]
    if summary["top_kernels"]:
        kernels = [row | {"name": f"`{short_name(row['name'])}`"} for row in summary["top_kernels"][:8]]
        parts.append(markdown_table(kernels, _KERNELS))
    return parts + pictures(results, place, "profile_ranges")


def trace_findings(summary: dict[str, Any]) -> list[str]:
    """Launches, busy shares and communication, as far as they were recorded."""
    found = [f"Recorded by {summary['engine']}: {summary['window']} in {summary['window_ms']:.2f} ms."]
    if summary["launches_per_step"] is not None:
        forward = summary["launches_per_forward"]
        of_forward = f", {forward:.0f} of them in the forward pass" if forward is not None else ""
        found.append(f"{summary['launches_per_step']:.0f} kernel launches per step{of_forward}.")
    elif summary["launches_per_forward"] is not None:
        found.append(f"{summary['launches_per_forward']:.0f} kernel launches per forward pass.")
    busy, dispatch, waits = (summary[f"{name}_share"] for name in ("gpu_busy", "dispatch", "wait"))
    if busy is not None and dispatch is not None:
        # A profiler slows the CPU down: what the GPU's work fills of an undisturbed step tells more.
        undisturbed = summary["undisturbed_gpu_share"]
        fills = busy if undisturbed is None else undisturbed
        bound = "the GPU is the limit" if fills > 0.9 else "the GPU waits for the CPU"
        alone = (
            ""
            if undisturbed is None
            else f"; without the profiler a {summary['window'].rpartition(' ')[2]} takes "
            f"{summary['undisturbed_ms']:.2f} ms, of which the GPU's work fills {undisturbed:.1%}"
        )
        found.append(
            f"The GPU is busy {busy:.1%} of the time, the CPU asks it for work {dispatch:.1%} and waits for it "
            f"{waits:.1%} of the time{alone}: {bound}."
        )
    if summary["communication_ms"]:
        found.append(
            f"{summary['communication_ms']:.2f} ms of communication kernels, "
            f"{summary['communication_overlap_share']:.0%} of them beside compute."
        )
    return [*found, *(f"Caution: {warning}." for warning in summary["warnings"])]


def _memory(memories: Sequence[Results], place: Place) -> list[str]:
    if not memories:
        return []
    parts = ["## Memory"]
    if len(memories) > 1:
        peaks = [peak_row(results.rows) | {"run": _link(results, place)} for results in memories]
        parts.append(markdown_table(peaks, (Column("run", "profile"), *_MEMORY)))
        parts += bullets(growth_findings([results.rows for results in memories]))
    for results in memories:
        parts += section(results, place, _place(results), level=3)
        parts += bullets([memory_finding(results.rows)])
        if results in _fullest(memories):
            parts.append(markdown_table(results.rows, _MEMORY))
        else:
            parts += full_table(results, place, "memory_report.md")
        parts += pictures(results, place, "memory_timeline")
    return parts


def _headline(summary: dict[str, Any]) -> str:
    """Launches and who waits for whom; of a recording that knows neither, how long it took."""
    said = [finding for finding in trace_findings(summary) if not finding.startswith("Caution")]
    return " ".join(said[1:3] or said)


def _fullest(memories: Sequence[Results]) -> list[Results]:
    """The one profile with the highest peak; none where there are none."""
    return sorted(memories, key=lambda results: float(peak_row(results.rows)["peak_gib"]))[-1:]


def growth_findings(profiles: Sequence[Rows]) -> list[str]:
    """What a longer context costs, where one model was profiled at several."""
    alike: dict[tuple[Any, ...], dict[int, Rows]] = {}
    for rows in profiles:
        first = rows[0]
        if "context_length" in first:
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
        keeps = f"; what forward keeps for backward {grows}" if mode != "forward" else ""
        found.append(
            f"{model}, {mode}: from {short} to {long} tokens of context the peak grows from {peaks[0]:.1f} to "
            f"{peaks[1]:.1f} GiB{keeps}."
        )
    return found


def _kept_by_forward(rows: Rows) -> float:
    return max((float(row["activations_gib"]) for row in rows if row["phase"] == "forward"), default=0.0)


def _place(results: Results) -> str:
    """The folder of the rows: what a section is called."""
    return results.path.parent.as_posix()


def _link(results: Results, place: Place) -> str:
    folder: Path = results.path.parent
    return f"[{folder.as_posix()}]({place.link(folder)})"
