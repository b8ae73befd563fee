"""The data-parallelism write-up: what synchronising gradients costs, accounted for byte by byte."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmkit.bench.ddp_report import (
    ALL_REDUCE_NOTES,
    DDP_COLUMNS,
    ladder_notes,
    megabytes,
    scaling_in_words,
    with_units,
)
from lmkit.measure.tables import Rows, markdown_table
from lmkit.reports.readings import by_folder, comparison, heading, ladders
from lmkit.reports.results import Results, of_kind
from lmkit.reports.writing import Place, bullets, document, full_table, in_short, pictures, pivot, section

_PICTURES = (
    "ddp_throughput",
    "ddp_exposed",
    "ddp_bucket_sweep",
    "ddp_overlap",
    "bucket_sweep",
    "overlap",
    "overlap_zero1_bf16",
)
# They communicate after the backward pass: there is nothing beside which they could hide.
_NOTHING_BESIDE = ("naive", "flat")


def write_up(found: Sequence[Results], place: Place) -> str | None:
    """The report on all rows of `bench ddp` and `bench all-reduce`; None if there are none."""
    chosen, collectives = of_kind(found, "ddp"), of_kind(found, "all-reduce")
    folders = by_folder(chosen)
    if not folders and not collectives:
        return None
    return document(
        "# Data parallelism",
        "Every rank computes the gradients of its own rows of the batch; before the optimizer step they are "
        "averaged over the ranks. The strategies differ in how many calls they make (one per parameter, one for "
        "everything, one per bucket) and when: after the backward pass, or beside it.",
        "An all-reduce of n bytes over W ranks makes each rank send at least 2 (W-1)/W n bytes: the tables hold "
        "what was sent beside that formula. *Alone* is a step's communication with nothing beside it, *exposed* "
        "what the step takes longer than the same step without communication: overlap hides the difference. "
        "Contenders take turns in every round; a sample is that of the slowest rank.",
        *in_short((_title(members), _newest_findings(members)) for members in folders),
        *ladder_notes([row for results in chosen for row in results.rows], DDP_COLUMNS),
        *(part for members in folders for part in _folder(members, place)),
        *(part for results in collectives for part in _collectives(results, place)),
    )


def _folder(members: Sequence[Results], place: Place) -> list[str]:
    """The models of one folder; of those that several files hold, the newest rows, then all readings side by side."""
    parts = section(members[-1], place, _title(members))
    if len(members) > 1:
        parts.append(
            f"{len(members)} readings ({', '.join(results.path.stem for results in members)}); of each model "
            "the newest is shown."
        )
    for ladder in ladders(members):
        for part, rows in ladder.parts.items():
            parts.append(f"### {heading(ladder, part)}")
            parts += bullets(findings(rows))
            parts.append(markdown_table([with_units(row) for row in rows], DDP_COLUMNS))
        parts += comparison(ladder)
    return parts + pictures(members[-1], place, *_PICTURES)


def _title(members: Sequence[Results]) -> str:
    return members[-1].path.parent.as_posix()


def _newest_findings(members: Sequence[Results]) -> list[str]:
    """What the newest rows of every model of a folder say first."""
    return [
        f"{ladder.case}: {found[0]}"
        for ladder in ladders(members)
        for rows in ladder.parts.values()
        if (found := findings(rows))
    ]


def findings(rows: Rows) -> list[str]:
    """What one ladder supports: the fastest, what overlap hid, the bytes, the bucket size, memory."""
    timed = {row["contender"]: row for row in rows if row.get("step_ms")}
    found = []
    synced = [row for name, row in timed.items() if row["world_size"] > 1 and name != "none"]
    full_precision = [row for row in synced if "bf16" not in row["contender"]]
    if full_precision:
        best = min(full_precision, key=lambda row: row["step_ms"])
        scaling = f", {scaling_in_words(best)}" if best.get("scaling") else ""
        found.append(
            f"Fastest with fp32 gradients: {best['contender']}, {best['step_ms']:.2f} ms a step{scaling}."
        )
    naive, bucketed = timed.get("naive"), timed.get("bucketed")
    if naive and bucketed and naive.get("exposed_ms") and bucketed.get("exposed_ms") is not None:
        found.append(
            f"Overlap: {bucketed['exposed_ms']:.2f} ms of bucketed's communication show in the step, "
            f"{bucketed['exposed_ms'] / naive['exposed_ms']:.2f} of naive's {naive['exposed_ms']:.2f} ms."
        )
    alone = [
        row
        for row in synced
        if row["contender"] not in _NOTHING_BESIDE
        and row.get("communication_alone_ms")
        and row.get("exposed_ms") is not None
    ]
    if alone:
        hidden = max(alone, key=_hidden)
        if _hidden(hidden) <= 0:
            found.append(
                "Nothing is hidden: every step takes longer by more than its communication alone does."
            )
        else:
            found.append(
                f"Most hidden: {hidden['contender']}, whose {hidden['communication_alone_ms']:.2f} ms of "
                f"communication (alone) leave {hidden['exposed_ms']:.2f} ms exposed: {_hidden(hidden):.0%} hidden."
            )
    counted = [row for row in synced if row.get("expected_link_bytes") and row.get("link_bytes")]
    if counted:
        apart = max(abs(row["link_bytes"] / row["expected_link_bytes"] - 1) for row in counted)
        who = "1 contender" if len(counted) == 1 else f"{len(counted)} contenders"
        found.append(f"Bytes: what {who} sent differs from the formula by at most {apart:.2%}.")
    sizes = sorted(
        (
            row
            for row in synced
            if row["contender"].startswith("bucketed") and row["contender"].endswith(" MB")
        ),
        key=lambda row: row["step_ms"],
    )
    if len(sizes) > 1:
        found.append(
            f"Bucket size: {sizes[0]['contender'].removeprefix('bucketed ')} is best "
            f"({sizes[0]['step_ms']:.2f} ms, {sizes[0]['calls_per_step']} calls), "
            f"{sizes[-1]['contender'].removeprefix('bucketed ')} worst "
            f"({sizes[-1]['step_ms']:.2f} ms, {sizes[-1]['calls_per_step']} calls)."
        )
    if bucketed and bucketed.get("peak_overhead") is not None:
        found.append(f"Memory: bucketed peaks at {bucketed['peak_overhead']:+.1%} of one rank's.")
    return found


def _hidden(row: dict[str, Any]) -> float:
    return 1.0 - float(row["exposed_ms"]) / float(row["communication_alone_ms"])


def _collectives(results: Results, place: Place) -> list[str]:
    parts = section(results, place, f"Collectives: {results.path.parent.as_posix()}")
    largest = max(results.rows, key=lambda row: row["bus_gb_per_s"])
    smallest = min(results.rows, key=lambda row: row["median_us"])
    parts += bullets(
        [
            f"Highest bus bandwidth: {largest['operation']} of {megabytes(largest['bytes']):,g} MB "
            f"{largest['dtype']} on {largest['world_size']} ranks, {largest['bus_gb_per_s']:.1f} GB/s.",
            f"A call takes at least {smallest['median_us']:.0f} us ({smallest['operation']}, "
            f"{smallest['bytes']:,} bytes): with many small calls that is what counts.",
        ]
    )
    parts.append(
        pivot(
            results.rows,
            lambda row: f"{row['operation']}, {row['dtype']}, {row['world_size']} ranks",
            lambda row: megabytes(row["bytes"]),
            lambda row: f"{row['bus_gb_per_s']:.1f} ({row['median_us']:,.0f})",
            corner="bus GB/s (us) \\ MB",
        )
    )
    parts += full_table(results, place, "all_reduce_report.md")
    return [*parts, *ALL_REDUCE_NOTES, *pictures(results, place, "all_reduce_bandwidth")]
