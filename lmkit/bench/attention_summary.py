"""The rows of `lmkit bench attention` in words and pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmkit.bench.harness import grouped
from lmkit.bench.summary import Summary
from lmkit.measure.plots import grouped_bars, heat_map, line_panels
from lmkit.measure.tables import Column, Rows, markdown_table
from lmkit.registry import ATTENTION

TIME = Column("median_ms", "ms", ".3g", instead="status", axis="time, ms")
COLUMNS = (
    Column("tier", "tier"),
    Column("head_dim", "D", "d"),
    Column("mask", "mask"),
    Column("direction", "direction"),
    Column("kernel", "kernel"),
    TIME,
    Column("spread", "spread", ".0%"),
    Column("tflops", "TFLOP/s", ".3g"),
    Column("share_of_matmul", "% peak", ".1%"),
    Column("peak_gb", "GB", ".3g"),
    Column("speedup", "speedup", ".2f"),
)
VERSUS_SDPA = (
    Column("versus_sdpa", "x PyTorch", ".3f"),
    Column("versus_sdpa_low", "95% from", ".3f"),
    Column("versus_sdpa_high", "to", ".3f"),
    Column("best_sdpa", "that is"),
)
SHAPE = ("batch", "heads", "kv_heads", "head_dim", "causal", "dtype", "layout", "data")
"""The fields on which times depend, besides the lengths."""


def summarize(rows: Rows) -> Summary:
    """Say what the rows support: ours against PyTorch's best, the fastest at the longest tier, where memory ends."""
    first, masks = rows[0], ["causal" if row["causal"] else "full" for row in rows]
    if mixed := len(set(masks)) > 1:
        rows = [row | {"mask": mask} for row, mask in zip(rows, masks, strict=True)]
    columns = [column for column in COLUMNS if mixed or column.key != "mask"]
    grid = [row for row in rows if row.get("part") == "grid"]
    fields = ("batch", "heads", "kv_heads", "dtype", "layout", "data")
    about = [f"{key} {first[key]}" for key in fields if len({row.get(key) for row in rows}) == 1]
    baseline = next((row["kernel"] for row in rows if row.get("speedup") == 1.0), None)
    notes = [
        "D: head_dim; tier: tokens, or queries:keys; spread: (p90 - p10) / median; GB (10^9): peak on top of the "
        "inputs, output included; '% peak': of the matmul TFLOP/s measured in the same run",
        *([f"speedup: {baseline} / variant, median of paired rounds"] if baseline else []),
    ]
    return Summary(
        "Attention",
        columns,
        [row for row in rows if row.get("part") != "grid"],
        about=", ".join(about if mixed else [*about, masks[0]]),
        findings=findings(rows),
        tables={"Head dimension x length": markdown_table(grid, columns)} if grid else {},
        notes=notes,
        wide=VERSUS_SDPA,
    )


def findings(rows: Rows) -> list[str]:
    """Return the sentences that the rows support."""
    found = []
    timed = [row for row in rows if row.get("part") == "tiers" and row.get("tflops")]
    own = {name for name in ATTENTION.names if name != "sdpa"}
    for direction, members in grouped(timed, lambda row: str(row["direction"])).items():
        if compared := [row for row in members if row["kernel"] in own and row.get("versus_sdpa")]:
            top = max(compared, key=lambda row: row["tflops"])
            ratios = [row["versus_sdpa"] for row in compared if row["kernel"] == top["kernel"]]
            several = len(ratios) > 1
            times = f"{min(ratios):.2f} to {max(ratios):.2f}" if several else f"{ratios[0]:.2f}"
            cases = f"{len(ratios)} cases" if several else "one case"
            found.append(
                f"{direction}: {top['kernel']} is {times} times as fast as the best PyTorch backend in {cases}; its "
                f"highest rate is {top['tflops']:.3g} TFLOP/s, {top['share_of_matmul']:.0%} of the matrix product's "
                "in the same run."
            )
        best = min(members, key=lambda row: (-row["num_queries"] * row["num_keys"], row["median_ms"]))
        shapes = {tuple(map(row.get, SHAPE)) for row in members if row["tier"] == best["tier"]}
        if len(shapes) == 1:
            found.append(
                f"{direction} at {best['tier']}: {best['kernel']} is fastest, {best['median_ms']:.4g} ms, "
                f"{best['tflops']:.3g} TFLOP/s."
            )
    for kernel, mine in grouped(square_tiers(rows), lambda row: str(row["kernel"])).items():
        if ended := [row["num_keys"] for row in mine if row["status"] == "out of memory"]:
            limits = [row for row in rows if row.get("part") == "memory limit" and row["kernel"] == kernel]
            fits = [row["num_keys"] for row in limits or mine if row["status"] in ("ok", "longest that fits")]
            before = [length for length in fits if length < min(ended)]
            longest = f"; the longest that fits is {max(before)}" if before else ""
            found.append(f"{kernel} runs out of memory at {min(ended)} tokens{longest}.")
    return found or ["No tier was measured."]


def square_tiers(rows: Rows) -> Rows:
    """Return the rows of tiers with as many queries as keys."""
    return [row for row in rows if row["part"] == "tiers" and row["num_queries"] == row["num_keys"]]


def pictures(rows: Rows) -> dict[str, bytes]:
    """Draw forward and backward bars, scaling, and the grid (or the square tiers, as one line)."""
    grid = [row for row in rows if row["part"] == "grid"]
    square = [row for row in square_tiers(rows) if row["direction"] == "forward"]
    files = {
        "attention_sweep_forward.png": _bars(rows, "forward"),
        "attention_sweep_heatmap.png": _heat_map(grid or square, "forward"),
        "attention_sweep_scaling.png": line_panels(
            square,
            "num_keys",
            TIME,
            group="kernel",
            title=_title(square, "forward"),
            x_label="sequence length (tokens)",
            log_y=True,
        ),
    }
    with_backward = any(row["direction"] == "backward" for row in rows)
    if with_backward:
        files["attention_sweep_backward.png"] = _bars(rows, "backward")
    if with_backward and grid:
        files["attention_sweep_heatmap_backward.png"] = _heat_map(grid, "backward")
    return files


def _title(rows: Rows, what: str) -> str:
    shape = "".join(f": batch {row['batch']}, {row['heads']} heads, {row['dtype']}" for row in rows[:1])
    return f"Attention {what}{shape}"


def _tier(row: Mapping[str, Any]) -> str:
    named = row["tier"].isalnum() and not row["tier"].isdecimal()
    return f"{row['tier']}\n{row['num_keys']}" if named else str(row["tier"])


def _bars(rows: Rows, direction: str) -> bytes:
    chosen = [row for row in rows if row["part"] == "tiers" and row["direction"] == direction]
    return grouped_bars(
        chosen,
        TIME,
        group=_tier,
        series="kernel",
        title=_title(chosen, direction) + " (median, whiskers p10 to p90)",
        x_label="sequence length (tokens; queries:keys where they differ)",
        log_y=True,
    )


def _heat_map(rows: Rows, direction: str) -> bytes:
    """Draw our best kernel's speedup over the baseline; its TFLOP/s if there is no baseline."""
    rows = [row for row in rows if row["direction"] == direction]
    timed = {row["kernel"] for row in rows if row.get("median_ms")}
    ours = [name for name in ATTENTION.names if name in timed and name != "sdpa"]
    baseline = next((row["kernel"] for row in rows if row.get("speedup") == 1.0), None)
    kernel = ours[-1] if ours else baseline
    as_ratio = baseline is not None and kernel != baseline
    lengths, head_dims = (sorted({row[key] for row in rows}) for key in ("num_keys", "head_dim"))
    key = "speedup" if as_ratio else "tflops"
    found = {(row["head_dim"], row["num_keys"]): row.get(key) for row in rows if row["kernel"] == kernel}
    return heat_map(
        [str(length) for length in lengths],
        [str(head_dim) for head_dim in head_dims],
        [[found.get((head_dim, length)) for length in lengths] for head_dim in head_dims],
        title=_title(rows, f"{direction}, {kernel}"),
        x_label="sequence length (tokens)",
        y_label="head_dim",
        value_label=f"times as fast as {baseline}" if as_ratio else "TFLOP/s",
        center=1.0 if as_ratio else None,
    )
