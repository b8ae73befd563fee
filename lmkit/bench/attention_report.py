"""The attention bench's rows as files: CSV, JSON lines, three (or four) pictures and the Markdown report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmkit.bench.attention_gate import FULL_CHECK_LENGTH, SAMPLED_ROWS
from lmkit.measure.limits import limits_sentence
from lmkit.measure.plots import grouped_bars, heat_map, line_plot, of_time
from lmkit.measure.tables import Column, Rows, markdown_table, picture_lines, row_files

STEM = "attention_sweep"

COLUMNS = (
    Column("tier", "tier"),
    Column("head_dim", "D", "d"),
    Column("direction", "direction"),
    Column("kernel", "kernel"),
    Column("median_ms", "ms", ".4g", instead="status"),
    Column("spread", "spread", ".0%"),
    Column("tflops", "TFLOP/s", ".3g"),
    Column("share_of_matmul", "% peak", ".1%"),
    Column("peak_gb", "GB", ".3g"),
    Column("speedup", "speedup", ".2f"),
)
_VERDICT_COLUMNS = (
    Column("tier", "tier"),
    Column("kernel", "kernel"),
    Column("direction", "direction"),
    Column("versus_sdpa", "times as fast", ".3f"),
    Column("versus_sdpa_low", "95% from", ".3f"),
    Column("versus_sdpa_high", "to", ".3f"),
    Column("best_sdpa", "as"),
    Column("versus_sdpa_verdict", "verdict"),
)
_SHORT_STATUS = {"out of memory": "OOM", "wrong result": "wrong", "skipped": "too slow"}
_OURS = ("flash_triton", "flash_torch", "vectorized", "reference")


def columns_for(rows: Rows) -> tuple[Column, ...]:
    """Those of a table of these rows: no speed-ups where the baseline was not measured."""
    return tuple(column for column in COLUMNS if column.key != "speedup" or has_speedups(rows))


def has_speedups(rows: Rows) -> bool:
    return any(row.get("speedup") is not None for row in rows)


def report_files(
    rows: Rows, options: dict[str, Any], environment: dict[str, Any], notes: Sequence[str]
) -> dict[str, bytes | str]:
    """name -> content of every file of the bench."""
    files = row_files(f"{STEM}_results", list(rows))
    files[f"{STEM}_forward.png"] = _bars(rows, options, "forward")
    files[f"{STEM}_heatmap.png"] = _heat_map(rows, options)
    files[f"{STEM}_scaling.png"] = _scaling(rows, options)
    if options["backward"]:
        files[f"{STEM}_backward.png"] = _bars(rows, options, "backward")
    files[f"{STEM}_report.md"] = _report(rows, options, environment, notes, sorted(files))
    return files


def _describe(options: dict[str, Any], *, head_dim: bool = True) -> str:
    parts = [f"batch {options['batch']}", f"heads {options['heads']}"]
    if options["kv_heads"] != options["heads"]:
        parts.append(f"kv_heads {options['kv_heads']}")
    if head_dim:
        parts.append(f"head_dim {options['head_dim']}")
    return ", ".join([*parts, "causal" if options["causal"] else "full", options["dtype"]])


def _names(rows: Rows, key: str) -> list[str]:
    return list(dict.fromkeys(row[key] for row in rows))


def _bars(rows: Rows, options: dict[str, Any], direction: str) -> bytes:
    chosen = [row for row in rows if row["part"] == "tiers" and row["direction"] == direction]
    tiers = _names(chosen, "tier")
    by_place = {(row["kernel"], row["tier"]): row for row in chosen}
    kernels = [name for name in _names(chosen, "kernel") if _any_time(chosen, name)]
    values, whiskers, reasons = {}, {}, {}
    for kernel in kernels:
        places = [by_place[kernel, tier] for tier in tiers]
        reasons[kernel] = [_SHORT_STATUS.get(place["status"], str(place["status"])) for place in places]
        values[kernel] = [place.get("median_ms") for place in places]
        whiskers[kernel] = [of_time(place) for place in places]
    labels = []
    for tier in tiers:
        length = next(row["num_keys"] for row in chosen if row["tier"] == tier)
        labels.append(tier if ":" in tier or tier.isdecimal() else f"{tier}\n{length}")
    return grouped_bars(
        labels,
        values,
        errors=whiskers,
        log_y=True,
        reasons=reasons,
        title=f"Attention {direction}: {_describe(options)} (median, whiskers p10 to p90)",
        x_label="sequence length (tokens; queries:keys where they differ)",
        y_label="time (ms, log scale)",
    )


def _any_time(rows: Rows, kernel: str) -> bool:
    return any(row["kernel"] == kernel and row.get("median_ms") for row in rows)


def _scaling(rows: Rows, options: dict[str, Any]) -> bytes:
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        square = row["num_queries"] == row["num_keys"]
        if row["part"] == "tiers" and row["direction"] == "forward" and square and row.get("median_ms"):
            series.setdefault(row["kernel"], []).append((row["num_keys"], row["median_ms"]))
    return line_plot(
        series,
        title=f"Attention forward: {_describe(options)}",
        x_label="sequence length (tokens)",
        y_label="time (ms, log scale)",
        log_x=True,
        log_y=True,
    )


def _heat_map(rows: Rows, options: dict[str, Any]) -> bytes:
    """The grid (or the square tiers, as one line): speed-up of our best kernel over the baseline, else TFLOP/s."""
    chosen = [row for row in rows if row["direction"] == "forward" and row["num_queries"] == row["num_keys"]]
    if any(row["part"] == "grid" for row in chosen):
        chosen = [row for row in chosen if row["part"] == "grid"]
    timed = {row["kernel"] for row in chosen if row.get("median_ms")}
    baseline = options["baseline"]
    ours = next((name for name in _OURS if name in timed and name != baseline), baseline)
    as_ratio = baseline in timed and ours != baseline
    lengths = sorted({row["num_keys"] for row in chosen})
    head_dims = sorted({row["head_dim"] for row in chosen})
    found = {
        (row["head_dim"], row["num_keys"]): row.get("speedup" if as_ratio else "tflops")
        for row in chosen
        if row["kernel"] == ours
    }
    return heat_map(
        [str(length) for length in lengths],
        [str(head_dim) for head_dim in head_dims],
        [[found.get((head_dim, length)) for length in lengths] for head_dim in head_dims],
        title=f"{ours}, forward: {_describe(options, head_dim=False)}",
        x_label="sequence length (tokens)",
        y_label="head_dim",
        value_label=f"times as fast as {baseline}" if as_ratio else "TFLOP/s",
        center=1.0 if as_ratio else None,
    )


def _report(
    rows: Rows,
    options: dict[str, Any],
    environment: dict[str, Any],
    notes: Sequence[str],
    files: Sequence[str],
) -> str:
    limits = environment["limits"]
    lines = [
        "# Attention sweep",
        "",
        f"{_describe(options)}, on {limits['device']}, torch {environment['packages']['torch']}, "
        f"{environment['time_utc']}.",
        "",
        f"{limits_sentence(limits)} (10^9 bytes read plus written).",
        "",
        f"Every variant was compared before it was timed: with a float64 oracle on two heads (up to "
        f"{FULL_CHECK_LENGTH} tokens every row, beyond that a sample of {SAMPLED_ROWS} rows and the gradients that "
        "these cause in all keys), and with PyTorch's kernel on every row of every head. Rounds are "
        f"interleaved ({options['warmup']} warm-up calls, up to {options['iters']} rounds; kernels that are slow for "
        f"that sit out rounds), times are medians of the raw samples in `{STEM}_results.jsonl`. GB (10^9) is what "
        "the call needed on top of its inputs, its output included.",
        "",
        "## What was found",
        "",
        *(f"- {finding}" for finding in findings(rows, options)),
        "",
    ]
    for part, title in (("tiers", "Tiers"), ("grid", "Head dimension x length")):
        chosen = [row for row in rows if row["part"] == part]
        if chosen:
            lines += [f"## {title}", "", markdown_table(chosen, columns_for(chosen))]
    against_sdpa = [row for row in rows if row.get("versus_sdpa") is not None and row["part"] == "tiers"]
    if against_sdpa:
        lines += [
            "## Against the fastest SDPA backend of the same round",
            "",
            markdown_table(against_sdpa, _VERDICT_COLUMNS),
        ]
    ran = {(row["kernel"], row["implementation"]) for row in rows if row.get("implementation")}
    if ran:
        lines += [
            "Implementations that ran: " + ", ".join(f"{name}: {which}" for name, which in sorted(ran)) + ".",
            "",
        ]
    failed = [row for row in rows if row["status"] != "ok" and row["part"] != "memory limit"]
    if failed:
        lines += ["## Not measured", ""]
        lines += [
            f"- {row['kernel']}, {row['tier']}, head_dim {row['head_dim']}, {row['direction']}: {row['status']}"
            f" ({row['detail']})"
            for row in failed
        ]
        lines.append("")
    lines += [*notes, ""]
    lines += picture_lines(files)
    return "\n".join(lines) + "\n"


def findings(rows: Rows, options: dict[str, Any]) -> list[str]:
    """The sentences that the rows support: the fastest per direction, speed-ups, where memory ended."""
    found = []
    tiers = [row for row in rows if row["part"] == "tiers"]
    for direction in _names(tiers, "direction"):
        timed = [row for row in tiers if row["direction"] == direction and row.get("median_ms")]
        if not timed:
            continue
        longest = max(row["num_queries"] * row["num_keys"] for row in timed)
        last = [row for row in timed if row["num_queries"] * row["num_keys"] == longest]
        best = min(last, key=lambda row: row["median_ms"])
        found.append(
            f"{direction} at {best['tier']}: {best['kernel']} is fastest, {best['median_ms']:.4g} ms, "
            f"{best['tflops']:.3g} TFLOP/s, {best['share_of_matmul']:.1%} of the measured matmul rate."
        )
        ratios = [row for row in timed if row.get("speedup") and row["kernel"] != options["baseline"]]
        if ratios:
            top = max(ratios, key=lambda row: row["speedup"])
            found.append(
                f"{direction}: the largest speed-up over {options['baseline']} is {top['kernel']}'s at "
                f"{top['tier']}, {top['speedup']:.2f}x{_interval(top)}."
            )
    for kernel in _names(tiers, "kernel"):
        square = [row for row in tiers if row["kernel"] == kernel and row["num_queries"] == row["num_keys"]]
        ended = [row["num_keys"] for row in square if row["status"] == "out of memory"]
        fitted = [
            row["num_keys"]
            for row in square
            if row["status"] == "ok" and row["num_keys"] < min(ended, default=0)
        ]
        exact = [row["num_keys"] for row in rows if row["part"] == "memory limit" and row["kernel"] == kernel]
        if ended:
            before = f"; the longest that fits is {max(exact or fitted)}" if exact or fitted else ""
            found.append(f"{kernel} runs out of memory at {min(ended)} tokens{before}.")
    wrong = _names([row for row in rows if row["status"] == "wrong result"], "kernel")
    found += [f"{kernel} gave wrong results (see below) and was not timed there." for kernel in wrong]
    return found or ["No tier was measured."]


def _interval(row: dict[str, Any]) -> str:
    """The 95% interval of a row's speed-up, in brackets, or that there is none."""
    if row["verdict"] == "too few repeats":
        return " (too few rounds for an interval)"
    return f" (95% {row['speedup_low']:.2f} to {row['speedup_high']:.2f})"
