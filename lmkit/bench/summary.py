"""Rows in words: the table and the sentences of a terminal, a report, or a document of `lmkit report`.

Rows that are wrong come first, whatever a bench says of the others.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lmkit.measure.limits import limits_sentence
from lmkit.measure.tables import (
    TERMINAL_WIDTH,
    Column,
    Rows,
    markdown_table,
    picture_lines,
    terminal_table,
)

WRONG = ("wrong result", "impossible rate")
"""Values of `status` in rows of variants that compute something else, or whose figures cannot be true."""
MEASURED = (None, "ok", "longest that fits")
"""Values of `status` in rows with a measurement; `detail` of another row says why there is none."""
UNCHECKED = "unchecked"
"""The field of a row that says why nothing checked the results of its variant."""
REASONS_SHOWN = 3


@dataclass(frozen=True)
class Summary:
    """The table and the sentences of a terminal, a report or a document of `lmkit report`.

    Attributes:
        columns: columns of the table; a column without any value is left out.
        rows: rows of the table.
        about: one line on the case: sizes, dtype.
        findings: sentences that the rows support, the most important first.
        tables: heading -> further Markdown for reports.
        notes: what the table does not say; the columns' own notes come after them.
        wide: further columns for reports; a terminal has no room for them.
        wrong: a sentence on each kind of wrong row; `summarized` fills it.
    """

    title: str
    columns: Sequence[Column]
    rows: Rows
    about: str = ""
    findings: Sequence[str] = ()
    tables: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    wide: Sequence[Column] = ()
    wrong: Sequence[str] = ()

    @property
    def measured(self) -> bool:
        """Whether any row has a measurement."""
        return any(row.get("status") in MEASURED for row in self.rows)

    def filled(self, columns: Sequence[Column]) -> list[Column]:
        """Return the columns for which some row has something to show."""
        keys = {key for row in self.rows for key, value in row.items() if value is not None}
        return [column for column in columns if column.key in keys or column.instead in keys]

    def explained(self, shown: Sequence[Column]) -> list[str]:
        """Return the notes below a table of these columns."""
        meanings = "; ".join(f"{column.header}: {column.note}" for column in shown if column.note)
        return [*self.notes, *([meanings] if meanings else [])]

    def named(self, rows: Rows, reason: Callable[[Mapping[str, Any]], str | None]) -> dict[str, list[str]]:
        """Return reason -> the rows that have it, named by their first columns."""
        shown = ["status" in (column.key, column.instead) for column in self.columns]
        names = self.columns[: shown.index(True)] if True in shown else ()
        found: dict[str, list[str]] = {}
        for row in rows:
            if why := reason(row):
                told = (column.text(row) for column in names if row.get(column.key) is not None)
                found.setdefault(why, []).append(" ".join(told))
        return found

    @property
    def not_measured(self) -> dict[str, list[str]]:
        """The reasons of rows without a measurement that are not wrong."""
        return self.named(self.rows, lambda row: None if row.get("status") in WRONG else _reason(row))


def summarized(summarize: Callable[[Rows], Summary], rows: Rows) -> Summary:
    """Return a bench's summary of its rows, with what is wrong or was not checked in any of them."""
    summary = summarize(rows)
    wrong = summary.named(rows, lambda row: _reason(row) if row.get("status") in WRONG else None)
    unchecked = summary.named(rows, lambda row: row.get(UNCHECKED))
    return replace(
        summary,
        wrong=[f"{'; '.join(names)}: {reason}." for reason, names in wrong.items()],
        notes=[
            *summary.notes,
            *(f"not checked: {'; '.join(names)}: {why}" for why, names in unchecked.items()),
        ],
    )


def _reason(row: Mapping[str, Any]) -> str | None:
    """Return `status: detail` of a row without a measurement, else None."""
    if row.get("status") in MEASURED:
        return None
    return ": ".join(str(row[key]) for key in ("status", "detail") if row.get(key))


def terminal_text(summary: Summary) -> str:
    """Return what is wrong, the table, the reasons of rows without a measurement, and the notes; at most 100
    characters wide."""
    shown = summary.filled(summary.columns)
    below = (*_first(list(summary.not_measured)), *summary.explained(shown))
    above, under = (
        "".join(f"{textwrap.fill(line, TERMINAL_WIDTH)}\n" for line in lines)
        for lines in (_first(summary.wrong), below)
    )
    return above + terminal_table(summary.rows, shown) + under


def _first(lines: Sequence[str]) -> list[str]:
    more = len(lines) - REASONS_SHOWN
    return [*lines[:REASONS_SHOWN], *([f"and {more} more of these: see the report"] if more > 0 else [])]


def report_text(summary: Summary, environment: Mapping[str, Any], pictures: Sequence[str]) -> str:
    """Return the Markdown report of one bench."""
    return document(f"# {summary.title}", *report_body(summary, environment), *picture_lines(pictures))


def report_body(summary: Summary, environment: Mapping[str, Any], level: int = 2) -> list[str]:
    """Return the paragraphs of a report below its title; `level` is that of their headings."""
    heading = "#" * level
    about = f"{summary.about}. " if summary.about else ""
    parts = [f"{about}Measured on {machine(environment)}."]
    if limits := environment.get("limits"):
        parts.append(f"{limits_sentence(limits)}.")
    if found := [*summary.wrong, *summary.findings]:
        parts += [f"{heading} What was found", bullets(found)]
    if columns := summary.filled((*summary.columns, *summary.wide)):
        parts += [
            f"{heading} Results",
            markdown_table(summary.rows, columns),
            bullets(summary.explained(columns)),
        ]
    for title, table in summary.tables.items():
        parts += [f"{heading} {title}", table]
    if reasons := summary.not_measured:
        lines = (f"{reason} ({'; '.join(names)})" for reason, names in reasons.items())
        parts += [f"{heading} Not measured", bullets(lines)]
    return parts


def machine(environment: Mapping[str, Any]) -> str:
    """Return one line that names the machine, as far as `environment.json` does."""
    gpus = [gpu.get("name", "") for gpu in environment.get("gpus", ())]
    cpu = environment.get("cpu", {}).get("name", "")
    parts = [f"{len(gpus)} x {gpus[0]}" if gpus else f"a CPU ({cpu})" if cpu else "an unnamed machine"]
    if version := environment.get("packages", {}).get("torch"):
        parts.append(f"torch {version}")
    if time := environment.get("time_utc"):
        parts.append(time[:10])
    return ", ".join(parts)


def bullets(sentences: Iterable[str]) -> str:
    """Return a Markdown list, or nothing."""
    return "\n".join(f"- {sentence}" for sentence in sentences)


def document(*paragraphs: str) -> str:
    """Join paragraphs by empty lines."""
    return "\n\n".join(text.strip("\n") for text in paragraphs if text.strip()) + "\n"
