"""Several files of rows in one folder are readings of the same models on different days: the newest counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmkit.measure.tables import Rows
from lmkit.reports.results import Results
from lmkit.reports.writing import grouped, pivot


@dataclass(frozen=True)
class Ladder:
    """The rows of one model: those of the newest file that has it, and by its name those of every file."""

    case: str
    newest: Results
    parts: dict[str, Rows]
    readings: dict[str, Rows]


def by_folder(results: Sequence[Results]) -> list[list[Results]]:
    """Files of one folder together, in the order of their names; folders with several come last."""
    folders = grouped(results, lambda one: one.path.parent).values()
    return sorted(folders, key=lambda members: len(members) > 1)


def ladders(members: Sequence[Results]) -> list[Ladder]:
    """Every model that a folder's files speak of, in the order in which it was first measured."""
    cases = dict.fromkeys(str(row["case"]) for results in members for row in results.rows)
    found = []
    for case in cases:
        having = [results for results in members if _of(results, case)]
        newest = having[-1]
        found.append(
            Ladder(
                case,
                newest,
                grouped(_of(newest, case), lambda row: str(row.get("part") or "")),
                {results.path.stem: _of(results, case) for results in having},
            )
        )
    return found


def heading(ladder: Ladder, part: str) -> str:
    """What the newest rows of a model are called; a part that only numbers the reading says what the file says."""
    named = part and not part.startswith("reading")
    reading = f", {ladder.newest.path.stem}" if len(ladder.readings) > 1 else ""
    return ladder.case + (f" ({part}{reading})" if named else f" ({reading[2:]})" if reading else "")


def comparison(ladder: Ladder, chosen: Sequence[str] | None = None) -> list[str]:
    """A line per contender, a column per reading; nothing where there is one reading.

    Args:
        chosen: contenders (None: all that were measured at least twice).
    """
    if len(ladder.readings) < 2:
        return []
    rows = [
        row | {"reading": reading}
        for reading, members in ladder.readings.items()
        for row in {row["contender"]: row for row in reversed(members)}.values()
        if row.get("step_ms")
    ]
    times = grouped(rows, lambda row: row["contender"])
    repeated = [row for row in rows if len(times[row["contender"]]) > 1]
    if chosen is not None:
        repeated = [row for row in repeated if row["contender"] in chosen]
    if not repeated:
        return []
    order = list(dict.fromkeys(row["contender"] for members in ladder.readings.values() for row in members))
    repeated.sort(key=lambda row: order.index(row["contender"]))
    return [
        "What was measured more than once, each time by the version of its day on a machine of its own: ms a step "
        "(in brackets the scaling):",
        pivot(
            repeated,
            lambda row: str(row["contender"]),
            lambda row: str(row["reading"]),
            lambda row: f"{row['step_ms']:.2f}" + (f" ({row['scaling']:.1%})" if row.get("scaling") else ""),
            corner="contender \\ reading",
        ),
    ]


def _of(results: Results, case: str) -> Rows:
    return [row for row in results.rows if str(row["case"]) == case]
