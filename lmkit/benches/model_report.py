"""The model bench's rows as files: CSV, JSON lines, pictures and the Markdown report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmkit.measure.plots import grouped_bars
from lmkit.measure.results import row_files
from lmkit.measure.tables import Column, markdown_table

Rows = Sequence[dict[str, Any]]

COLUMNS = (
    Column("size", "size"),
    Column("length", "length", "d"),
    Column("precision", "prec."),
    Column("compile", "compile"),
    Column("mode", "mode"),
    Column("median_ms", "ms", ".2f", instead="status"),
    Column("mean_ms", "mean ms", ".2f"),
    Column("spread", "spread", ".0%"),
    Column("tokens_per_s", "tokens/s", ",.0f"),
    Column("mfu", "MFU", ".1%"),
    Column("peak_gb", "GB", ".2f"),
)
WARMUP_COLUMNS = (
    Column("size", "size"),
    Column("compile", "compile"),
    Column("warmup", "warm-up steps", "d"),
    Column("mean_ms", "mean ms", ".2f", instead="status"),
    Column("std_ms", "standard deviation ms", ".2f"),
    Column("median_ms", "median ms", ".2f"),
    Column("first_ms", "first step ms", ".2f"),
)


def report_files(
    rows: Rows, options: dict[str, Any], environment: dict[str, Any], notes: Sequence[str]
) -> dict[str, bytes | str]:
    """name -> content of every file of the bench."""
    files = row_files("model_results", list(rows))
    files["model_time.png"] = _bars(rows, "median_ms", "Time of a pass", "time (ms, log scale)", log_y=True)
    files["model_memory.png"] = _bars(
        rows, "peak_gb", "Peak memory", "peak memory (GB = 10^9 bytes)", log_y=False
    )
    files["model_throughput.png"] = _bars(
        rows, "tokens_per_s", "Throughput", "tokens per second (log scale)", log_y=True, spec=",.0f"
    )
    if options["warmup_study"]:
        files["model_warmup.png"] = _warmup_bars(rows)
    files["model_report.md"] = _report(rows, options, environment, notes, sorted(files))
    return files


def _models(rows: Rows) -> Rows:
    return [row for row in rows if row["part"] == "model"]


def _bars(rows: Rows, key: str, title: str, y_label: str, *, log_y: bool, spec: str = ".3g") -> bytes:
    chosen = _models(rows)
    groups = list(dict.fromkeys(f"{row['size']}\n{row['length']}" for row in chosen))
    series: dict[str, list[float | None]] = {}
    for row in chosen:
        name = f"{row['mode']}, {row['precision']}" + (
            f", compile {row['compile']}" if row["compile"] != "none" else ""
        )
        place = groups.index(f"{row['size']}\n{row['length']}")
        series.setdefault(name, [None] * len(groups))[place] = row.get(key)
    return grouped_bars(
        groups,
        series,
        title=title,
        x_label="model size and sequence length (tokens)",
        y_label=y_label,
        log_y=log_y,
        spec=spec,
    )


def _warmup_bars(rows: Rows) -> bytes:
    chosen = [row for row in rows if row["part"] == "warm-up"]
    groups = list(dict.fromkeys(str(row["warmup"]) for row in chosen))
    series: dict[str, list[float | None]] = {}
    errors: dict[str, list[tuple[float, float] | None]] = {}
    for row in chosen:
        name = f"{row['size']}, compile {row['compile']}: mean"
        place = groups.index(str(row["warmup"]))
        series.setdefault(name, [None] * len(groups))[place] = row.get("mean_ms")
        if row.get("mean_ms") is not None:
            below = min(row["std_ms"], 0.95 * row["mean_ms"])
            errors.setdefault(name, [None] * len(groups))[place] = (below, row["std_ms"])
    return grouped_bars(
        groups,
        series,
        errors={name: errors.get(name, [None] * len(groups)) for name in series},
        title="What too little warm-up does (whole steps; whiskers: one standard deviation)",
        x_label="unmeasured steps before the measured ones",
        y_label="mean time of a step (ms, log scale)",
        log_y=True,
    )


def _report(
    rows: Rows,
    options: dict[str, Any],
    environment: dict[str, Any],
    notes: Sequence[str],
    files: Sequence[str],
) -> str:
    limits = environment["limits"]
    rates = ", ".join(f"{rate} TFLOP/s {dtype}" for dtype, rate in limits["matmul_tflops"].items())
    lines = [
        "# Model benchmark",
        "",
        f"Batch {options['batch_size']}, vocabulary {options['vocab_size']}, attention {options['attention']}, on "
        f"{limits['device']}, torch {environment['packages']['torch']}, {environment['time_utc']}.",
        "",
        f"Measured limits of this machine in this run: matmul {rates}; copy {limits['copy_gb_per_s']} GB/s.",
        "",
        "## What was found",
        "",
        *(f"- {finding}" for finding in findings(rows)),
        "",
        "## Models",
        "",
        markdown_table(_models(rows), COLUMNS),
    ]
    study = [row for row in rows if row["part"] == "warm-up"]
    if study:
        lines += [
            "## Warm-up",
            "",
            "Whole steps of a fresh model after so many unmeasured ones; the first line is the first thing that this "
            "process ran.",
            "",
            markdown_table(study, WARMUP_COLUMNS),
        ]
    failed = [row for row in rows if row["status"] != "ok"]
    if failed:
        lines += ["## Did not fit", ""]
        lines += [
            f"- {row['size']} at {row['length']}, {row['precision']}, {row['mode']}: {row['detail']}"
            for row in failed
        ]
        lines.append("")
    lines += [*notes, ""]
    lines += [f"![{name}]({name})" for name in files if name.endswith(".png")]
    return "\n".join(lines) + "\n"


def findings(rows: Rows) -> list[str]:
    """The sentences that the rows support."""
    found = []
    timed = [row for row in _models(rows) if row.get("median_ms")]
    if timed:
        best = max(timed, key=lambda row: row["mfu"])
        found.append(
            f"Best utilisation: {best['size']} at {best['length']}, {best['precision']}, compile {best['compile']}, "
            f"{best['mode']}: {best['mfu']:.1%} MFU ({best['mfu_basis']}), {best['tokens_per_s']:,.0f} tokens/s."
        )
    by_case = {
        (row["size"], row["length"], row["compile"], row["mode"], row["precision"]): row["median_ms"]
        for row in timed
    }
    for (size, length, how, mode, precision), time_ms in by_case.items():
        slow = by_case.get((size, length, how, mode, "fp32"))
        if mode == "step" and precision != "fp32" and slow:
            found.append(
                f"{size} at {length}, compile {how}: a step in {precision} takes {time_ms / slow:.2f} of fp32's time."
            )
    study = [row for row in rows if row["part"] == "warm-up" and row.get("mean_ms")]
    if len(study) > 1:
        ratio = study[0]["mean_ms"] / study[-1]["median_ms"]
        found.append(
            f"Warm-up: with {study[0]['warmup']} unmeasured steps the mean is {ratio:.2f} times the median after "
            f"{study[-1]['warmup']}."
        )
    unfit = sorted({(row["size"], row["length"]) for row in rows if row["status"] == "out of memory"})
    found += [
        f"{size} at {length} tokens does not fit in memory in at least one mode." for size, length in unfit
    ]
    return found
