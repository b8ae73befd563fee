"""The optimizer-sharding write-up: how much memory ZeRO-1 frees, and what it costs or gains in time."""

from __future__ import annotations

from collections.abc import Sequence

from lmkit.bench.ddp_contenders import SHARDED
from lmkit.bench.ddp_report import (
    DDP_COLUMNS,
    OPTIMIZER_COLUMNS,
    OPTIMIZER_NOTES,
    scaling_in_words,
    with_units,
)
from lmkit.measure.tables import Column, Rows, markdown_table
from lmkit.reports.readings import by_folder, comparison, heading, ladders
from lmkit.reports.results import Results, of_kind
from lmkit.reports.writing import Place, bullets, document, grouped, in_short, pictures, section

_SPEED = (
    *(column for column in DDP_COLUMNS if column.key in ("contender", "step_ms", "tokens_per_s", "scaling")),
    Column("peak_gb", "peak GB", ".2f"),
)


def write_up(found: Sequence[Results], place: Place) -> str | None:
    """The report on `bench optimizer` and on the sharded contenders of `bench ddp`; None without either."""
    memory = of_kind(found, "optimizer")
    speed = by_folder(
        [
            results
            for results in of_kind(found, "ddp")
            if any(row["contender"].startswith(SHARDED) for row in results.rows)
        ]
    )
    if not memory and not speed:
        return None
    return document(
        "# Optimizer state sharding (ZeRO-1)",
        "AdamW keeps two fp32 numbers per parameter, and every data-parallel rank keeps the same ones. ZeRO-1 "
        "gives each of W ranks 1/W of them: gradients are reduce-scattered, so that a rank gets the average of its "
        "share only, it updates that share, and the new weights are gathered. A reduce-scatter and an all-gather "
        "together move the bytes of one all-reduce, so nothing is paid on the link; the optimizer's own time is "
        "divided by W. With bf16 weights and fp32 master weights in the shard, half the bytes travel.",
        "GB are 10^9 bytes, of one rank.",
        *in_short(
            [
                *((results.path.parent.as_posix(), memory_findings(results.rows)) for results in memory),
                *((_title(members), _newest_findings(members)) for members in speed),
            ]
        ),
        *(part for results in memory for part in _memory(results, place)),
        *(part for members in speed for part in _speed(members, place)),
    )


def _memory(results: Results, place: Place) -> list[str]:
    parts = section(results, place, f"Memory: {results.path.parent.as_posix()}")
    for case, rows in grouped(results.rows, lambda row: str(row["case"])).items():
        parts.append(f"### {case}")
        parts += bullets(memory_findings(rows))
        shown = [with_units(row) for row in rows]
        known = [
            column for column in OPTIMIZER_COLUMNS if any(row.get(column.key) is not None for row in shown)
        ]
        parts.append(markdown_table(shown, known))
    return [*parts, *OPTIMIZER_NOTES, *pictures(results, place, "optimizer_state")]


def memory_findings(rows: Rows) -> list[str]:
    """The share of the state that is left, and the peak against the unsharded optimizer's."""
    found = []
    plain = next((row for row in rows if not row["contender"].startswith(SHARDED)), None)
    for row in rows:
        if row["contender"].startswith("zero1"):
            size = f"{row['contender']}: {row['state_bytes'] / 1e6:,.1f} MB of state on a rank"
            if row.get("state_share") is not None:
                ideal = 1 / row["world_size"]
                size += f", {row['state_share']:.2%} of the whole ({ideal:.2%} plus padding is the least possible)"
            found.append(size + ".")
            if plain and plain.get("peak_bytes") and row.get("peak_bytes"):
                found.append(
                    f"{row['contender']}: a step peaks at {row['peak_bytes'] / 1e9:.2f} GB, "
                    f"{row['peak_bytes'] / plain['peak_bytes'] - 1:+.1%} of {plain['contender']}'s "
                    f"{plain['peak_bytes'] / 1e9:.2f} GB."
                )
    return found


def _speed(members: Sequence[Results], place: Place) -> list[str]:
    """What sharding does to the speed of every model of a folder; the newest rows of each."""
    parts = section(members[-1], place, f"Speed: {_title(members)}")
    for ladder in ladders(members):
        for part, rows in ladder.parts.items():
            chosen = _sharded_and_beside(rows)
            if not any(row["contender"].startswith("zero1") for row in chosen):
                continue
            parts.append(f"### {heading(ladder, part)}")
            parts += bullets(speed_findings(chosen))
            with_peak = [
                row | {"peak_gb": row["peak_bytes"] / 1e9} if row.get("peak_bytes") else row for row in chosen
            ]
            parts.append(markdown_table(with_peak, _SPEED))
        everything = [row for rows in ladder.readings.values() for row in rows]
        parts += comparison(ladder, [row["contender"] for row in _sharded_and_beside(everything)])
    return parts


def _title(members: Sequence[Results]) -> str:
    return members[-1].path.parent.as_posix()


def _sharded_and_beside(rows: Rows) -> Rows:
    """The sharded contenders, and what they are compared with."""
    return [
        row
        for row in rows
        if row["contender"].startswith((*SHARDED, "one rank")) or row["contender"] == "bucketed"
    ]


def _newest_findings(members: Sequence[Results]) -> list[str]:
    """What the newest rows of every model of a folder say; the sharded contender with bf16 weights first."""
    found = [
        f"{ladder.case}, {finding}"
        for ladder in ladders(members)
        for rows in ladder.parts.values()
        for finding in speed_findings(_sharded_and_beside(rows))
    ]
    return sorted(found, key=lambda finding: "bf16" not in finding)


def speed_findings(rows: Rows) -> list[str]:
    """Each sharded contender beside PyTorch's ZeroRedundancyOptimizer and beside one rank; medians."""
    timed = {row["contender"]: row for row in rows if row.get("step_ms")}
    rival = timed.get("torch_ddp + ZeRO")
    found = []
    for name, row in timed.items():
        if not name.startswith("zero1"):
            continue
        parts = []
        if rival:
            parts.append(
                f"{rival['step_ms'] / row['step_ms']:.3f} times as fast as torch DDP + ZeroRedundancyOptimizer"
            )
        if row.get("scaling"):
            parts.append(scaling_in_words(row))
        bucketed = timed.get("bucketed")
        if bucketed and bucketed.get("peak_bytes") and row.get("peak_bytes"):
            parts.append(f"{row['peak_bytes'] / bucketed['peak_bytes'] - 1:+.1%} of bucketed's peak memory")
        if parts:
            found.append(f"{name}: " + ", ".join(parts) + ".")
    return found
