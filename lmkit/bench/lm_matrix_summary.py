"""The rows of `lmkit bench lm-matrix` in words and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmkit.bench.ddp_variants import SOLO
from lmkit.bench.harness import grouped, mfu_notes
from lmkit.bench.summary import Summary
from lmkit.measure.plots import grouped_bars, loss_curve, of_rate, table_picture
from lmkit.measure.statistics import FEWEST_PAIRS, median, paired_ratio
from lmkit.measure.tables import Column, Rows

ONE_RANK = SOLO[0]
HEADLINE = (ONE_RANK, "naive", "bucketed")
"""The strategies of the headline picture."""
SAME_CURVE = 0.005
"""Largest relative difference of loss curves that are drawn as one."""
COLUMNS = (
    Column("kernel", "kernel"),
    Column("strategy", "strategy"),
    Column("median_ms", "ms per step", ".2f", instead="status"),
    Column("spread", "spread", ".0%"),
    Column("tokens_per_s", "tokens/s", ",.0f"),
    Column("mfu", "MFU", ".1%"),
    Column("peak_gb", "GB", ".3f"),
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
    notes += graph_notes(rows)
    if "epoch_s" in has:
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


def graph_notes(rows: Rows) -> list[str]:
    """Say why steps were not in a CUDA graph, if some were."""
    captured = [row for row in rows if row.get("captured")]
    if all(row["captured"] == "no" for row in captured):
        return []
    why = grouped([row for row in captured if row["captured"] == "no"], lambda row: _why(row["graph"]))
    reasons = []
    for reason, of_reason in why.items():
        names = tuple(dict.fromkeys(str(row["strategy"]) for row in of_reason))
        reasons.append(reason if reason.startswith(names) else f"{', '.join(names)}: {reason}")
    return [
        "graph: whether a CUDA graph launched the steps" + (f"; no: {'; '.join(reasons)}" if reasons else "")
    ]


def _why(note: str) -> str:
    """Return the reason of a graph's note, without the shares, which differ from row to row."""
    reason = note.partition(", ")[2]
    return "the GPU sets the pace" if reason.startswith("the host is busy") else reason


def _ranks(rows: Rows) -> str:
    ranks = max(row["ranks"] for row in rows)
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def _apart(losses: Sequence[float], others: Sequence[float]) -> float:
    """Return the largest relative difference of two curves."""
    return max(abs(mine - theirs) / abs(theirs) for mine, theirs in zip(losses, others, strict=True))


def findings(rows: Rows) -> list[str]:
    """Return the sentences that the rows support."""
    ran = [row for row in rows if row["status"] == "ok"]
    # On several ranks `none` trains a separate model on each rank: a bound for the others' speed, not a training.
    trained = [row for row in ran if row["ranks"] == 1 or row["strategy"] != "none"]
    if not trained:
        only_none = (
            "Only `none` ran, which on several ranks trains no model: there is nothing to compare it with."
        )
        return [only_none if ran else "Nothing ran."]
    best = max(trained, key=lambda row: row["tokens_per_s"])
    found = [f"Fastest: {best['kernel']} with {best['strategy']}, {best['tokens_per_s']:,.0f} tokens/s."]
    for kernel, of_kernel in grouped(ran, lambda row: str(row["kernel"])).items():
        if text := _of_kernel({row["strategy"]: row for row in of_kernel}):
            found.append(f"{kernel}: {text}.")
    if wide := _undecided(ran):
        found.append(wide)
    if len(trained) > 1:
        first = trained[0]
        apart = max(_apart(row["losses"], first["losses"]) for row in trained[1:])
        found.append(
            f"Convergence: the loss curves of {len(trained)} trainings differ by at most {apart:.2g} of the loss, "
            f"which falls from {first['first_loss']:.3f} to {first['final_loss']:.3f}."
        )
    return found


def _of_kernel(rows: Mapping[str, dict[str, Any]]) -> str:
    """Compare one rank, naive and the best strategy of a kernel, in one sentence."""
    parts = []
    naive, alone, none = (rows.get(name) for name in ("naive", ONE_RANK, "none"))
    together = {name: row for name, row in rows.items() if row["ranks"] > 1 and name != "none"}
    if not together:
        return ""
    name, best = min(together.items(), key=lambda item: item[1]["median_ms"])
    if "bucketed" in together:
        name, best = "bucketed", together["bucketed"]  # the headline's
    if naive is not None and best is not naive:
        parts.append(f"{name} against naive {paired_ratio(best['samples_ms'], naive['samples_ms'])}")
    if none is not None:
        parts.append(f"{none['median_ms'] / best['median_ms']:.0%} of the speed without communication")
    if alone is not None:
        ratio = paired_ratio(best["samples_ms"], alone["samples_ms"])
        parts.append(f"{name} on {best['ranks']} ranks against one rank {ratio}")
    return "; ".join(parts)


def _undecided(ran: Rows) -> str:
    """Say how sure the speedups are."""
    reach = [
        (row["speedup_high"] - row["speedup_low"]) / 2 / row["speedup"]
        for row in ran
        if len(row["samples_ms"]) >= FEWEST_PAIRS
        and row.get("speedup_low") not in (None, row.get("speedup_high"))
    ]
    if not reach:
        return ""
    return f"The 95% intervals of the speedups reach +-{max(reach):.1%} at most, +-{median(reach):.1%} in the middle."


def pictures(rows: Rows) -> dict[str, bytes]:
    """Draw the matrix by time, memory and throughput, the loss curves, and bars and a table per kernel."""
    throughput = "tokens per second, all ranks"
    files = {
        f"lm_matrix_{name}.png": grouped_bars(
            rows,
            key,
            group="kernel",
            series="strategy",
            title=f"{title} ({_ranks(rows)})",
            x_label="attention kernel",
            y_label=y_label,
            spec=spec,
        )
        for name, key, title, y_label, spec in (
            ("time", "median_ms", "Time per training step", "time (ms)", ".3g"),
            ("memory", "peak_gb", "Peak memory of one rank", "peak memory (GB = 10^9 bytes)", ".3g"),
            ("throughput", "tokens_per_s", "Training throughput", throughput, ",.0f"),
        )
    }
    rows = with_ratios(rows)
    if len({row["strategy"] for row in rows} & set(HEADLINE)) > 1:
        files["lm_matrix_headline.png"] = headline(rows)
    files["lm_matrix_convergence.png"] = loss_curve(
        coinciding_curves(rows), title="Convergence, same start and batches", x_label="optimizer step"
    )
    has = {key for row in rows for key, value in row.items() if value is not None}
    columns = [column for column in (*COLUMNS[1:], *WIDE) if column.key in has or column.instead]
    for kernel, chosen in grouped(rows, lambda row: str(row["kernel"])).items():
        picture = grouped_bars(
            chosen,
            "tokens_per_s",
            group="strategy",
            whisker=of_rate,
            title=f"{kernel}: training throughput ({_ranks(rows)}; whiskers p10 to p90)",
            x_label="gradient strategy",
            y_label=throughput,
            spec=",.0f",
        )
        cells = [[column.text(row) for column in columns] for row in chosen]
        table = table_picture([column.header for column in columns], cells, title=f"lm-matrix: {kernel}")
        files[f"{kernel}_lm_matrix_throughput.png"] = picture
        files[f"lm_matrix_table_{kernel}.png"] = table
    return files


def coinciding_curves(rows: Rows) -> dict[str, list[tuple[float, float]]]:
    """Return one curve for all trainings whose losses are within `SAME_CURVE`, named after them."""
    groups: list[Rows] = []
    for row in rows:
        if row["status"] != "ok":
            continue
        near = (group for group in groups if _apart(row["losses"], group[0]["losses"]) < SAME_CURVE)
        if (group := next(near, None)) is not None:
            group.append(row)
        else:
            groups.append([row])
    curves = {}
    for group in groups:
        strategies = ", ".join(dict.fromkeys(row["strategy"] for row in group))
        name = (
            f"{len(group)} trainings ({strategies})"
            if len(group) > 1
            else f"{group[0]['kernel']}, {strategies}"
        )
        curves[name] = [(float(step), loss) for step, loss in enumerate(group[0]["losses"], 1)]
    return curves


def headline(rows: Rows) -> bytes:
    """Draw one rank -> naive -> bucketed and overlapped, for each kernel."""
    return grouped_bars(
        [row for row in rows if row["strategy"] in HEADLINE],
        "tokens_per_s",
        group="kernel",
        series=lambda row: (
            ONE_RANK if row["strategy"] == ONE_RANK else f"{row['strategy']}, {_ranks([dict(row)])}"
        ),
        whisker=of_rate,
        title=f"One rank, naive, bucketed and overlapped ({_ranks(rows)}; whiskers p10 to p90)",
        x_label="attention kernel",
        y_label="tokens per second",
        spec=",.0f",
    )
