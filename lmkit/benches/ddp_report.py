"""Rows of the parallel benches -> tables, plots and a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmkit.measure.environment import describe_environment
from lmkit.measure.plots import grouped_bars, line_plot
from lmkit.measure.results import BenchResult, row_files
from lmkit.measure.tables import Column, markdown_table
from lmkit.parallel.process_group import Ranks

Rows = list[dict[str, Any]]

DDP_COLUMNS = (
    Column("contender", "contender", instead="status"),
    Column("step_ms", "ms/step", ".2f", "status"),
    Column("spread", "spread", ".1%"),
    Column("tokens_per_s", "tokens/s", ",.0f"),
    Column("scaling", "scaling", ".1%"),
    Column("exposed_ms", "exposed ms", ".2f"),
    Column("peak_overhead", "memory", "+.1%"),
    Column("calls_per_step", "calls", ",d"),
    Column("link_mb", "MB sent", ",.1f"),
    Column("expected_mb", "formula", ",.1f"),
)
DDP_NOTES = (
    "scaling: one rank's step time over this one's, same rows per rank; spread: (p90 - p10) / median",
    "exposed: step time over that of the same step without communication (none)",
    "memory: peak over one rank's; MB (10^6 bytes) sent per rank and step, beside 2 (W-1)/W of the gradients",
)
ALL_REDUCE_COLUMNS = (
    Column("operation", "operation"),
    Column("dtype", "dtype"),
    Column("bytes", "bytes", ",d"),
    Column("median_us", "us", ",.1f"),
    Column("spread", "spread", ".1%"),
    Column("bus_gb_per_s", "bus GB/s", ".2f"),
)
ALL_REDUCE_NOTES = (
    "bus GB/s (10^9 bytes): what a rank must send, all-reduce 2 (W-1)/W and the others (W-1)/W of the buffer, / time",
)
OPTIMIZER_COLUMNS = (
    Column("contender", "contender"),
    Column("step_ms", "ms/step", ".2f"),
    Column("tokens_per_s", "tokens/s", ",.0f"),
    Column("state_mb", "state MB", ",.1f"),
    Column("state_share", "of plain", ".1%"),
    Column("init_mb", "after init MB", ",.0f"),
    Column("before_mb", "before step MB", ",.0f"),
    Column("after_mb", "after step MB", ",.0f"),
)
OPTIMIZER_NOTES = (
    "state: what the optimizer holds on this rank, MB (10^6 bytes); the rest: the CUDA allocator's",
)


def ddp_result(rows: Rows, sweep: Rows, ranks: Ranks) -> BenchResult:
    """The ladder, and the bucket sweep beside it."""
    for row in (*rows, *sweep):
        if "step_ms" in row:
            row["spread"] = (row["p90_ms"] - row["p10_ms"]) / row["step_ms"]
        for key, source in (("link_mb", "link_bytes"), ("expected_mb", "expected_link_bytes")):
            if row.get(source) is not None:
                row[key] = row[source] / 1e6
    environment = describe_environment() | {"world_size": ranks.world_size}
    everything = [row | {"part": "ladder"} for row in rows] + [
        row | {"part": "bucket sweep"} for row in sweep
    ]
    timed = [row for row in rows if "step_ms" in row]
    names = [row["contender"] for row in timed]
    files: dict[str, bytes | str] = {
        **row_files("ddp_results", everything),
        "ddp_throughput.png": grouped_bars(
            names,
            {"tokens/s": [row["tokens_per_s"] for row in timed]},
            title=f"Training throughput on {ranks.world_size} ranks",
            x_label="contender",
            y_label="tokens per second",
            spec=",.0f",
        ),
        "ddp_exposed.png": grouped_bars(
            [row["contender"] for row in timed if "exposed_ms" in row],
            {"exposed": [row["exposed_ms"] for row in timed if "exposed_ms" in row]},
            title="Communication that compute does not hide",
            x_label="contender",
            y_label="ms per step",
        ),
    }
    swept = [row for row in sweep if str(row["contender"]).startswith("bucketed") and "step_ms" in row]
    if swept:
        files["ddp_bucket_sweep.png"] = line_plot(
            {"bucketed": [(float(row["contender"].split()[1]), row["step_ms"]) for row in swept]},
            title="Step time over bucket size",
            x_label="bucket size (MiB)",
            y_label="ms per step",
            log_x=True,
        )
    files["ddp_report.md"] = _report("Data parallelism", everything, DDP_COLUMNS, DDP_NOTES, files)
    return BenchResult("ddp", everything, DDP_COLUMNS, files, environment, DDP_NOTES)


def all_reduce_result(rows: Rows, ranks: Ranks) -> BenchResult:
    """Bandwidth over message size."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        row["spread"] = (row["p90_us"] - row["p10_us"]) / row["median_us"]
        series.setdefault(f"{row['operation']} {row['dtype']}", []).append(
            (row["bytes"] / 1e6, row["bus_gb_per_s"])
        )
    files: dict[str, bytes | str] = {
        **row_files("all_reduce_results", rows),
        "all_reduce_bandwidth.png": line_plot(
            series,
            title=f"Collectives on {ranks.world_size} ranks",
            x_label="buffer (MB, 10^6 bytes)",
            y_label="bus bandwidth (GB/s, 10^9 bytes)",
            log_x=True,
        ),
    }
    files["all_reduce_report.md"] = _report("Collectives", rows, ALL_REDUCE_COLUMNS, ALL_REDUCE_NOTES, files)
    environment = describe_environment() | {"world_size": ranks.world_size}
    return BenchResult("all_reduce", rows, ALL_REDUCE_COLUMNS, files, environment, ALL_REDUCE_NOTES)


def optimizer_result(rows: Rows, ranks: Ranks) -> BenchResult:
    """Memory and speed of sharded optimizer state."""
    for row in rows:
        row["state_mb"] = row["state_bytes"] / 1e6
        for key, source in (
            ("init_mb", "init_bytes"),
            ("before_mb", "before_step_bytes"),
            ("after_mb", "after_step_bytes"),
        ):
            row[key] = None if row.get(source) is None else row[source] / 1e6
    files: dict[str, bytes | str] = {
        **row_files("optimizer_results", rows),
        "optimizer_state.png": grouped_bars(
            [row["contender"] for row in rows],
            {"state per rank": [row["state_mb"] for row in rows]},
            title=f"Optimizer state on each of {ranks.world_size} ranks",
            x_label="contender",
            y_label="MB (10^6 bytes)",
        ),
    }
    files["optimizer_report.md"] = _report(
        "Optimizer state sharding", rows, OPTIMIZER_COLUMNS, OPTIMIZER_NOTES, files
    )
    environment = describe_environment() | {"world_size": ranks.world_size}
    return BenchResult("optimizer", rows, OPTIMIZER_COLUMNS, files, environment, OPTIMIZER_NOTES)


def _report(
    title: str, rows: Rows, columns: Sequence[Column], notes: Sequence[str], files: dict[str, bytes | str]
) -> str:
    pictures = [f"![{name}]({name})" for name in files if name.endswith(".png")]
    return "\n\n".join([f"# {title}", markdown_table(rows, columns).rstrip(), *notes, *pictures]) + "\n"
