"""The rows of `lmkit bench lm-matrix` in words and pictures."""

from __future__ import annotations

from collections.abc import Sequence

from lmkit.bench.harness import Summary, grouped, mfu_notes
from lmkit.bench.pictures import bars
from lmkit.measure.plots import loss_curve, of_rate, table_picture
from lmkit.measure.statistics import paired_ratio
from lmkit.measure.tables import Column, Rows
from lmkit.registry import ATTENTION

SAME_CURVE = 0.005
"""Loss curves closer than this share of the loss are drawn as one: the eye could not tell them apart."""
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


def summarize(rows: Rows) -> Summary:
    """Say what the rows support: the fastest cell, the best strategy against naive, convergence."""
    return Summary(
        "lm-matrix: attention kernels x gradient strategies",
        COLUMNS,
        rows,
        about=f"{_ranks(rows)}, {rows[0].get('precision', '')}, compile {rows[0].get('compile', 'none')}",
        findings=findings(rows),
        notes=(
            *mfu_notes(rows),
            f"speedup: {rows[0]['strategy']} / strategy of the same kernel, paired epochs; GB (10^9): peak of one "
            "rank, weights and optimizer included",
        ),
    )


def _ranks(rows: Rows) -> str:
    return "1 rank" if rows[0]["ranks"] == 1 else f"{rows[0]['ranks']} ranks"


def _apart(losses: Sequence[float], others: Sequence[float]) -> float:
    """Return the largest relative difference of two curves."""
    return max(abs(mine - theirs) / abs(theirs) for mine, theirs in zip(losses, others, strict=True))


def findings(rows: Rows) -> list[str]:
    """Return the sentences that the rows support."""
    ran = [row for row in rows if row["status"] == "ok"]
    # On several ranks `none` leaves every rank with a model of its own: a bound for the others, and no training.
    trained = [row for row in ran if row["ranks"] == 1 or row["strategy"] != "none"]
    if not trained:
        only_none = (
            "Only `none` ran, which on several ranks trains no model: there is nothing to compare it with."
        )
        return [only_none if ran else "Nothing ran."]
    best = max(trained, key=lambda row: row["tokens_per_s"])
    found = [f"Fastest: {best['kernel']} with {best['strategy']}, {best['tokens_per_s']:,.0f} tokens/s."]
    of_kernel = {row["strategy"]: row for row in ran if row["kernel"] == best["kernel"]}
    naive, none = of_kernel.get("naive"), of_kernel.get("none")
    if best["ranks"] > 1 and naive is not None and best is not naive:
        ratio = paired_ratio(best["samples_ms"], naive["samples_ms"])
        bound = ""
        if none is not None:
            bound = (
                f"; that is {none['median_ms'] / best['median_ms']:.0%} of the speed without communication"
            )
        found.append(f"{best['strategy']} against naive: {ratio}{bound}.")
    if len(trained) > 1:
        first = trained[0]
        apart = max(_apart(row["losses"], first["losses"]) for row in trained[1:])
        found.append(
            f"Convergence: the loss curves of {len(trained)} trainings differ by at most {apart:.2g} of the loss, "
            f"which falls from {first['first_loss']:.3f} to {first['final_loss']:.3f}."
        )
    return found


def pictures(rows: Rows) -> dict[str, bytes]:
    """Draw the matrix by time, memory and throughput, the loss curves, and bars and a table per kernel."""
    throughput = "tokens per second, all ranks"
    files = {
        f"lm_matrix_{name}.png": bars(
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
    files["lm_matrix_convergence.png"] = loss_curve(
        coinciding_curves(rows), title="Convergence, same start and batches", x_label="optimizer step"
    )
    columns = COLUMNS[1:]
    for kernel, chosen in grouped(rows, lambda row: str(row["kernel"])).items():
        picture = bars(
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
        # Similar projects call some kernels otherwise, and their users look for files of those names.
        for name in (kernel, *(alias for alias, ours in ATTENTION.aliases.items() if ours == kernel)):
            files[f"{name}_lm_matrix_throughput.png"] = picture
            files[f"lm_matrix_table_{name}.png"] = table
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
