"""The rows of `lmkit bench lm-matrix` in words and pictures."""

from __future__ import annotations

from typing import Any

from lmkit.bench.ddp_variants import SOLO
from lmkit.bench.harness import grouped, mfu_notes
from lmkit.bench.summary import Summary
from lmkit.measure.plots import grouped_bars, loss_curve, table_picture
from lmkit.measure.statistics import paired_ratio
from lmkit.measure.tables import Column, Rows

ONE_RANK = SOLO[0]
HEADLINE = (ONE_RANK, "naive", "bucketed")
"""The strategies of the headline picture."""
TIME = Column("median_ms", "ms per step", ".2f", instead="status", axis="time of a step (ms)")
MEMORY = Column("peak_gb", "GB", ".3f", axis="peak memory (GB = 10^9 bytes)")
THROUGHPUT = Column("tokens_per_s", "tokens/s", ",.0f", axis="tokens per second, all ranks")
COLUMNS = (
    Column("kernel", "kernel"),
    Column("strategy", "strategy"),
    TIME,
    Column("spread", "spread", ".0%"),
    THROUGHPUT,
    Column("mfu", "MFU", ".1%"),
    MEMORY,
    Column("speedup", "speedup", ".3f"),
    Column("valid_loss", "valid loss", ".4f"),
)
WIDE = (
    Column("speedup_low", "95% from", ".3f"),
    Column("speedup_high", "to", ".3f"),
    Column("scaling", "scaling", ".1%"),
    Column("overhead", "memory over none", "+.1%"),
    Column("captured", "graph"),
    Column("epoch_s", "s per epoch", ".3f"),
    Column("final_loss", "last loss", ".4f"),
)


def summarize(rows: Rows) -> Summary:
    """Say what the rows support: the fastest cell, the best strategy against naive, convergence."""
    rows = with_ratios(rows)
    first = rows[0]
    has = {key for row in rows for key, value in row.items() if value is not None}
    notes = [*mfu_notes(rows), "GB (10^9): peak of one rank, weights and optimizer included"]
    if "speedup" in has:
        notes.append(f"speedup: over {first['strategy']} with the same kernel, paired epochs")
    if "scaling" in has:
        notes.append(
            f"scaling: the speed of all ranks / ranks x that of {ONE_RANK}, with the same batch of all ranks"
        )
    if "captured" in has:
        why = {row["graph"].partition(", ")[2] for row in rows if row.get("captured") == "no"}
        reasons = f"; no: {'; '.join(sorted(why))}" if why else ""
        notes.append(f"graph: whether a CUDA graph launched the steps{reasons}")
    if "valid_loss" in has:
        notes.append("valid loss: after all epochs, on held-out text")
    return Summary(
        "lm-matrix: attention kernels x gradient strategies",
        COLUMNS,
        rows,
        about=f"{_ranks(rows)}, {first.get('precision', '')}, compile {first.get('compile', 'none')}",
        findings=findings(rows),
        notes=notes,
        wide=WIDE,
    )


def with_ratios(rows: Rows) -> Rows:
    """Add scaling (against one rank), memory overhead (against `none`), both within each kernel, and whether a CUDA
    graph launched the steps."""
    found = {(row["kernel"], row["strategy"]): row for row in rows if row["status"] == "ok"}
    told = []
    for row in rows:
        alone, bare = (found.get((row["kernel"], name)) for name in (ONE_RANK, "none"))
        more: dict[str, Any] = {}
        if row["status"] == "ok" and row["ranks"] > 1:
            if alone is not None:
                more["scaling"] = paired_ratio(row["samples_ms"], alone["samples_ms"]).speedup / row["ranks"]
            if bare is not None:
                more["overhead"] = row["peak_gb"] / bare["peak_gb"] - 1
        if row.get("graph"):
            more["captured"] = "yes" if row["graph"].startswith("CUDA graph: on") else "no"
        told.append(row | more)
    return told


def _ranks(rows: Rows) -> str:
    ranks = max(row["ranks"] for row in rows)
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def findings(rows: Rows) -> list[str]:
    """Return the sentences that the rows support."""
    ran = [row for row in rows if row["status"] == "ok"]
    # On several ranks `none` trains a separate model on each rank: a bound for the others' speed, not a training.
    trained = [row for row in ran if row["ranks"] == 1 or row["strategy"] != "none"]
    if not trained:
        only_none = (
            "Only `none` ran, which on several ranks trains no model: nothing can be compared with it."
        )
        return [only_none if ran else "Nothing ran."]
    best = max(trained, key=lambda row: row["tokens_per_s"])
    found = [f"Fastest: {best['kernel']} with {best['strategy']}, {best['tokens_per_s']:,.0f} tokens/s."]
    for kernel, of_kernel in grouped(trained, lambda row: str(row["kernel"])).items():
        by_name = {row["strategy"]: row for row in of_kernel}
        together = [row for row in of_kernel if row["ranks"] > 1]
        if not together:
            continue
        fastest = by_name.get("bucketed") or min(together, key=lambda row: row["median_ms"])
        for other in (by_name.get("naive"), by_name.get(ONE_RANK)):
            if other is not None and other is not fastest:
                ratio = paired_ratio(fastest["samples_ms"], other["samples_ms"])
                found.append(f"{kernel}: {fastest['strategy']} against {other['strategy']} {ratio}.")
    if len(trained) > 1:
        first = trained[0]
        apart = max(
            abs(mine - theirs) / abs(theirs)
            for row in trained
            for mine, theirs in zip(row["losses"], first["losses"], strict=True)
        )
        found.append(
            f"Convergence: the loss curves of {len(trained)} trainings differ by at most {apart:.2g} of the loss, "
            f"which falls from {first['first_loss']:.3f} to {first['final_loss']:.3f}."
        )
    return found


def pictures(rows: Rows) -> dict[str, bytes]:
    """Draw the matrix by time, memory and throughput, the loss curves, and bars and a table per kernel."""
    by_kernel: dict[str, Any] = {"group": "kernel", "x_label": "attention kernel"}
    files = {
        f"lm_matrix_{name}.png": grouped_bars(
            rows, column, series="strategy", title=f"{title} ({_ranks(rows)})", **by_kernel
        )
        for name, column, title in (
            ("time", TIME, "Time per training step"),
            ("memory", MEMORY, "Peak memory of one rank"),
            ("throughput", THROUGHPUT, "Training throughput"),
        )
    }
    rows = with_ratios(rows)
    headline = [row for row in rows if row["strategy"] in HEADLINE]
    if len({row["strategy"] for row in headline}) > 1:
        files["lm_matrix_headline.png"] = grouped_bars(
            headline,
            THROUGHPUT,
            series=lambda row: row["strategy"] + ("" if row["ranks"] == 1 else f", {row['ranks']} ranks"),
            title=f"One rank, naive, bucketed and overlapped ({_ranks(rows)}; whiskers p10 to p90)",
            **by_kernel,
        )
    files["lm_matrix_convergence.png"] = loss_curve(
        {
            f"{row['kernel']}, {row['strategy']}": list(enumerate(row["losses"], 1))
            for row in rows
            if row["status"] == "ok"
        },
        title="Convergence, same start and batches",
        x_label="optimizer step",
    )
    columns = Summary("", (), rows).filled((*COLUMNS[1:], *WIDE))
    for kernel, chosen in grouped(rows, lambda row: str(row["kernel"])).items():
        files[f"{kernel}_lm_matrix_throughput.png"] = grouped_bars(
            chosen,
            THROUGHPUT,
            group="strategy",
            title=f"{kernel}: training throughput ({_ranks(rows)}; whiskers p10 to p90)",
            x_label="gradient strategy",
        )
        cells = [[column.text(row) for column in columns] for row in chosen]
        files[f"lm_matrix_table_{kernel}.png"] = table_picture(
            [column.header for column in columns], cells, title=f"lm-matrix: {kernel}"
        )
    return files
