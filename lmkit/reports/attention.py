"""The FlashAttention write-up: how fast each kernel is, beside what, and what limits it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmkit.measure.tables import Column, Rows, markdown_table
from lmkit.reports.results import Results, of_kind
from lmkit.reports.writing import (
    Place,
    bullets,
    document,
    full_table,
    grouped,
    in_short,
    pictures,
    pivot,
    section,
    titles,
)

_FIRST_CALLS = (
    Column("kernel", "kernel"),
    Column("direction", "direction"),
    Column("case", "case"),
    Column("first_call_s", "s", ".2f"),
    Column("detail", "how"),
)
_PICTURES = {  # file of rows -> what was drawn of them
    "acceptance": ("forward",),
    "attention_sweep_results": (
        "attention_sweep_forward",
        "attention_sweep_backward",
        "attention_sweep_scaling",
        "attention_sweep_heatmap",
    ),
}
_HOST_TIMES = (Column("kernel", "call"), Column("case", "case"), Column("median_us", "us", ".1f"))


def write_up(found: Sequence[Results], place: Place) -> str | None:
    """The report on all attention rows; None if there are none."""
    chosen = of_kind(found, "attention")
    if not chosen:
        return None
    return document(
        "# FlashAttention",
        "Attention written naively stores a length x length matrix of scores: its time and memory grow with the "
        "square of the length, and most of that time goes into moving the matrix. FlashAttention computes the "
        "same result tile by tile with a running softmax, so that memory grows linearly and the time is that of "
        "the matrix products.",
        "Every kernel was compared with a float64 oracle before it was timed; kernels take turns in every round, "
        "and a time is the median over rounds. TFLOP/s count 4 x batch x heads x queries x keys x head_dim for "
        "the forward pass, half of it when causal, and 2.5 times that for the backward pass. GB are 10^9 bytes "
        "on top of the inputs.",
        "The limit is the rate of a large matrix product measured in the same run: what a kernel misses of it goes "
        "into the softmax, whose exponentials run on other units, and into filling and emptying the pipeline of "
        "every program, which weighs more at short lengths and under a causal mask.",
        *in_short((titles(chosen)[results.path], findings(results.rows)) for results in chosen),
        *(part for results in chosen for part in _one(results, place, titles(chosen)[results.path])),
    )


def _one(results: Results, place: Place, title: str) -> list[str]:
    rows = results.rows
    parts = section(results, place, title)
    parts += bullets(findings(rows))
    for direction, members in grouped([row for row in rows if _timed(row)], _direction).items():
        parts.append(f"### {direction}: TFLOP/s (in brackets: times as fast as the best PyTorch backend)")
        alone = []
        for shape, same_shape in grouped(members, _set_and_shape).items():
            square = [row for row in same_shape if row["num_queries"] == row["num_keys"]]
            if len({row["num_keys"] for row in square}) > 1:
                parts += [
                    shape,
                    pivot(square, _name, lambda row: row["num_keys"], _rate, corner="kernel \\ length"),
                ]
                alone += [row for row in same_shape if row not in square]
            else:
                alone += same_shape
        if alone:
            parts.append(pivot(alone, _set_and_case, _name, _rate, corner="case \\ kernel"))
    for report in ("acceptance.md", "attention_sweep_report.md"):
        if results.path.stem in (report[:-3], report.replace("_report.md", "_results")):
            parts += full_table(results, place, report)
    parts += _calls(rows)
    failed = [row for row in rows if row["status"] != "ok"]
    if failed:
        parts.append("### Not timed")
        parts += bullets(_failures(failed))
    return parts + pictures(results, place, *_PICTURES.get(results.path.stem, ()))


def _calls(rows: Rows) -> list[str]:
    """What a first call costs (it compiles), and how long the CPU is busy with a later one."""
    first = [row for row in rows if row["status"] == "ok" and row.get("median_ms") is None]
    host = [row for row in rows if row.get("median_ms") is not None and not _timed(row)]
    parts = []
    if first:
        parts += [
            "### First calls",
            markdown_table([row | {"case": _case(row)} for row in first], _FIRST_CALLS),
        ]
    if host:
        with_units = [row | {"case": _case(row), "median_us": row["median_ms"] * 1e3} for row in host]
        parts += ["### CPU time of a call", markdown_table(with_units, _HOST_TIMES)]
    return parts


def findings(rows: Rows) -> list[str]:
    """What the rows support: the range against PyTorch, the highest rate, where memory ends."""
    found = []
    compared = [
        row for row in rows if _timed(row) and row.get("versus_sdpa") and row["kernel"] == "flash_triton"
    ]
    for direction, members in grouped(compared, _direction).items():
        slowest, fastest = (pick(members, key=lambda row: row["versus_sdpa"]) for pick in (min, max))
        least = f"{slowest['versus_sdpa']:.2f} ({_case(slowest)}) to " if len(members) > 1 else ""
        found.append(
            f"{direction}: flash_triton is {least}{fastest['versus_sdpa']:.2f} ({_case(fastest)}) times as fast "
            f"as the best PyTorch backend" + (f", over {len(members)} cases." if least else ".")
        )
        rated = [row for row in members if row.get("share_of_matmul")]
        if rated:
            top = max(rated, key=lambda row: row["tflops"])
            found.append(
                f"{direction}: its highest rate is {top['tflops']:.0f} TFLOP/s ({_case(top)}), "
                f"{top['share_of_matmul']:.0%} of the matrix product's rate in the same run."
            )
    ended = [row for row in rows if row["status"] == "out of memory"]
    for kernel, members in grouped(ended, lambda row: str(row["kernel"])).items():
        first = min(members, key=lambda row: row["num_keys"])
        found.append(f"{kernel} runs out of memory at {first['num_keys']:,} tokens ({_case(first)}).")
    return found


def _failures(rows: Rows) -> list[str]:
    by_reason = grouped(rows, lambda row: (row["kernel"], row["status"], row["batch"], _shape(row)))
    return [
        f"{kernel}: {status} at {', '.join(dict.fromkeys(map(_length, members)))} tokens, batch {batch}, {shape} "
        f"({', '.join(dict.fromkeys(map(_direction, members)))})"
        for (kernel, status, batch, shape), members in by_reason.items()
    ]


def _timed(row: dict[str, Any]) -> bool:
    return row.get("tflops") is not None


def _direction(row: dict[str, Any]) -> str:
    return str(row["direction"])


def _name(row: dict[str, Any]) -> str:
    return str(row["kernel"])


def _shape(row: dict[str, Any]) -> str:
    heads = (
        f"{row['heads']} heads"
        if row["kv_heads"] == row["heads"]
        else f"{row['heads']}:{row['kv_heads']} heads"
    )
    mask = "causal" if row["causal"] else "full"
    layout = "" if row["layout"] == "contiguous" else f", {row['layout']}"
    data = "" if row.get("data", "normal") == "normal" else f", {row['data']}"
    return f"head_dim {row['head_dim']}, {heads}, {mask}, {row['dtype']}{layout}{data}"


def _set_and_shape(row: dict[str, Any]) -> str:
    return f"{row['set']}: {_shape(row)}" if row.get("set") else _shape(row)


def _length(row: dict[str, Any]) -> str:
    length = f"{row['num_keys']:,}"
    return length if row["num_queries"] == row["num_keys"] else f"{row['num_queries']:,} x {length}"


def _set_and_case(row: dict[str, Any]) -> str:
    """Only the acceptance rows are divided into sets."""
    return f"{row['set']}: {_case(row)}" if row.get("set") else _case(row)


def _case(row: dict[str, Any]) -> str:
    return f"{_length(row)} tokens, batch {row['batch']}, {_shape(row)}"


def _rate(row: dict[str, Any]) -> str:
    ratio = row.get("versus_sdpa")
    return f"{row['tflops']:.3g}" + (f" ({ratio:.2f}x)" if ratio else "")
