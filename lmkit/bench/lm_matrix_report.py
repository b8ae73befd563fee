"""The lm-matrix's rows as files: CSV, JSON lines, pictures per matrix and per kernel, and the Markdown report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmkit.measure.limits import limits_sentence
from lmkit.measure.plots import grouped_bars, loss_curve, of_rate, table_picture
from lmkit.measure.statistics import paired_ratio
from lmkit.measure.tables import Column, Rows, markdown_table, picture_lines, row_files

SAME_CURVE = 0.005

COLUMNS = (
    Column("kernel", "kernel"),
    Column("strategy", "strategy"),
    Column("median_ms", "ms per step", ".2f", instead="status"),
    Column("spread", "spread", ".0%"),
    Column("tokens_per_s", "tokens/s", ",.0f"),
    Column("mfu", "MFU", ".1%"),
    Column("peak_gb", "GB", ".3f"),
    Column("speedup", "speedup", ".3f"),
    Column("final_loss", "last loss", ".4f"),
)


def report_files(
    rows: Rows, options: dict[str, Any], environment: dict[str, Any], notes: Sequence[str]
) -> dict[str, bytes | str]:
    """name -> content of every file of the bench."""
    files = row_files("lm_matrix_results", list(rows))
    files["lm_matrix_time.png"] = _matrix_bars(
        rows, "median_ms", "Time per training step", "time (ms)", ".3g"
    )
    files["lm_matrix_memory.png"] = _matrix_bars(
        rows, "peak_gb", "Peak memory of one rank", "peak memory (GB = 10^9 bytes)", ".3g"
    )
    files["lm_matrix_throughput.png"] = _matrix_bars(
        rows, "tokens_per_s", "Training throughput", "tokens per second, all ranks", ",.0f"
    )
    curves = _coinciding_curves(rows)
    alike = f": {next(iter(curves))}" if len(curves) == 1 else ""
    files["lm_matrix_convergence.png"] = loss_curve(
        curves, title=f"Convergence, same start and batches{alike}", x_label="optimizer step"
    )
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        chosen = [row for row in rows if row["kernel"] == kernel]
        files[f"{kernel}_lm_matrix_throughput.png"] = _kernel_bars(chosen, kernel)
        files[f"lm_matrix_table_{kernel}.png"] = table_picture(
            [column.header for column in COLUMNS[1:]],
            [[column.text(row) for column in COLUMNS[1:]] for row in chosen],
            title=f"lm-matrix: {kernel}",
        )
    files["lm_matrix_report.md"] = _report(rows, options, environment, notes, sorted(files))
    return files


def _coinciding_curves(rows: Rows) -> dict[str, list[tuple[float, float]]]:
    """One curve for all trainings whose losses the eye could not tell apart (`SAME_CURVE`), named after the first."""
    groups: list[list[dict[str, Any]]] = []
    for row in rows:
        if row["status"] != "ok":
            continue
        for group in groups:
            if _apart(row["losses"], group[0]["losses"]) < SAME_CURVE:
                group.append(row)
                break
        else:
            groups.append([row])
    curves = {}
    for group in groups:
        name = f"{group[0]['kernel']}, {group[0]['strategy']}"
        if len(group) > 1:
            apart = max(_apart(row["losses"], group[0]["losses"]) for row in group)
            name = f"{len(group)} trainings, {apart:.1g} of the loss apart"
            if len(groups) > 1:
                name += f" ({', '.join(_names(group, 'strategy'))})"
        curves[name] = [(float(step), loss) for step, loss in enumerate(group[0]["losses"], 1)]
    return curves


def _apart(losses: Sequence[float], others: Sequence[float]) -> float:
    """The largest relative difference of two curves."""
    return max(abs(mine - theirs) / abs(theirs) for mine, theirs in zip(losses, others, strict=True))


def _names(rows: Rows, key: str) -> list[str]:
    return list(dict.fromkeys(row[key] for row in rows))


def _matrix_bars(rows: Rows, key: str, title: str, y_label: str, spec: str) -> bytes:
    kernels, strategies = _names(rows, "kernel"), _names(rows, "strategy")
    found = {(row["kernel"], row["strategy"]): row.get(key) for row in rows}
    return grouped_bars(
        kernels,
        {strategy: [found.get((kernel, strategy)) for kernel in kernels] for strategy in strategies},
        title=f"{title} ({_ranks(rows)})",
        x_label="attention kernel",
        y_label=y_label,
        spec=spec,
        missing="none",
    )


def _kernel_bars(rows: Rows, kernel: str) -> bytes:
    tokens = {row["strategy"]: row.get("tokens_per_s") for row in rows}
    return grouped_bars(
        list(tokens),
        {kernel: list(tokens.values())},
        errors={kernel: [of_rate(row) for row in rows]},
        title=f"{kernel}: training throughput ({_ranks(rows)}; whiskers p10 to p90)",
        x_label="gradient strategy",
        y_label="tokens per second, all ranks",
        spec=",.0f",
        missing="none",
    )


def _ranks(rows: Rows) -> str:
    count = rows[0]["ranks"] if rows else 1
    return "1 rank" if count == 1 else f"{count} ranks"


def _report(
    rows: Rows,
    options: dict[str, Any],
    environment: dict[str, Any],
    notes: Sequence[str],
    files: Sequence[str],
) -> str:
    limits = environment["limits"]
    shape = (
        f"{options['num_layers']} layers, d_model {options['d_model']}, d_ff {options['d_ff']}, "
        f"{options['num_heads']} heads, context {options['context_length']}, vocabulary {options['vocab_size']}, "
        f"{options['precision']}, compile {options['compile']}, batch {options['batch_size']} over {_ranks(rows)}"
    )
    source = options["tokens"] or "built-in stories, byte by byte"
    lines = [
        "# lm-matrix: attention kernels x gradient strategies",
        "",
        f"{shape}; trained on {source}; on {limits['device']}, torch {environment['packages']['torch']}, "
        f"{environment['time_utc']}.",
        "",
        f"{limits_sentence(limits)}.",
        "",
        "## What was found",
        "",
        *(f"- {finding}" for finding in findings(rows)),
        "",
        "## Results",
        "",
        markdown_table(rows, COLUMNS),
        *notes,
        "",
    ]
    failed = [row for row in rows if row["status"] != "ok"]
    lines += [f"- {row['kernel']} x {row['strategy']}: {row['status']} ({row['detail']})" for row in failed]
    lines += ["", *picture_lines(files)]
    return "\n".join(lines) + "\n"


def findings(rows: Rows) -> list[str]:
    """The sentences that the rows support."""
    # On several ranks "none" leaves every rank with a model of its own: a bound of the others, and no way to train.
    trained = [
        row for row in rows if row["status"] == "ok" and (row["ranks"] == 1 or row["strategy"] != "none")
    ]
    if not any(row["status"] == "ok" for row in rows):
        return ["Nothing ran."]
    if not trained:
        return [
            "Only `none` ran, which on several ranks trains no model: there is nothing to compare it with."
        ]
    best = max(trained, key=lambda row: row["tokens_per_s"])
    found = [
        f"Fastest: {best['kernel']} with {best['strategy']}, {best['tokens_per_s']:,.0f} tokens/s "
        f"({best['mfu']:.1%} MFU)."
    ]
    kernels = {
        kernel: min((row for row in trained if row["kernel"] == kernel), key=lambda row: row["median_ms"])
        for kernel in _names(trained, "kernel")
    }
    ordered = sorted(kernels.values(), key=lambda row: row["median_ms"])
    if len(ordered) > 1:
        found.append(
            "Kernels, each with its fastest strategy: "
            + ", ".join(f"{row['kernel']} {row['median_ms']:.2f} ms" for row in ordered)
            + " per step."
        )
    if trained[0]["ranks"] == 1:
        found += _bookkeeping_finding(trained)
    else:
        for kernel in kernels:
            found += _strategy_findings(
                [row for row in rows if row["kernel"] == kernel and row["status"] == "ok"]
            )
    if len(trained) > 1:
        first = trained[0]
        apart = max(_apart(row["losses"], first["losses"]) for row in trained[1:])
        found.append(
            f"Convergence: the loss curves of {len(trained)} trainings differ by at most {apart:.2g} of the loss, "
            f"which falls from {first['first_loss']:.3f} to {first['final_loss']:.3f}."
        )
    least = min(trained, key=lambda row: row["peak_gb"])
    found.append(
        f"Least memory: {least['kernel']} with {least['strategy']}, {least['peak_gb']:.3f} GB on a rank."
    )
    return found


def _bookkeeping_finding(trained: Rows) -> list[str]:
    speedups = [row["speedup"] for row in trained if row.get("speedup") and row["speedup"] != 1.0]
    if not speedups:
        return []
    return [
        "With one rank no strategy communicates, and all but zero1 do the same work: speedups of "
        f"{min(speedups):.3f} to {max(speedups):.3f} are what their own bookkeeping costs, and noise."
    ]


def _strategy_findings(rows: Rows) -> list[str]:
    """The strategies of one kernel beside the simplest one, `naive`, and beside no communication at all."""
    by_name = {row["strategy"]: row for row in rows}
    naive = by_name.get("naive")
    synced = [row for row in rows if row["strategy"] not in ("none", "naive")]
    if not rows or naive is None or not synced:
        return []
    kernel = naive["kernel"]
    best = min(synced, key=lambda row: row["median_ms"])
    ratio = paired_ratio(best["samples_ms"], naive["samples_ms"])
    if ratio.verdict == "faster":
        interval = f"95% {ratio.low:.3f} to {ratio.high:.3f}"
        said = f"{best['strategy']} is {ratio.speedup:.3f} times as fast as naive ({interval})"
    else:
        said = f"no strategy is measurably faster than naive ({best['strategy']}: {ratio})"
    none = by_name.get("none")
    if none is not None:
        share = none["median_ms"] / best["median_ms"]
        said += f"; {best['strategy']} reaches {share:.0%} of the speed without communication"
    return [f"{kernel}: {said}."]
