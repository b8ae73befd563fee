"""Rows in words: the table and the sentences of a terminal, a report, or a document of `lmkit report`.

Table, sentences and picture follow from the columns that a bench declares (`summary_of`, `picture_of`). Rows that are
wrong come first.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

from lmkit.measure.limits import limits_sentence
from lmkit.measure.plots import grouped_bars
from lmkit.measure.statistics import FEWEST_PAIRS
from lmkit.measure.tables import TERMINAL_WIDTH, Column, Rows, grouped, markdown_table, terminal_table

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
        columns: those before the one that shows a status name a row; a column without any value is left out.
        about: one line on the case: sizes, dtype.
        findings: the most important first.
        tables: heading -> further Markdown for reports.
        notes: sentences below the table; the columns' own notes come after them.
    """

    title: str
    columns: Sequence[Column]
    rows: Rows
    about: str = ""
    findings: Sequence[str] = ()
    tables: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    wrong: Sequence[str] = ()

    @property
    def measured(self) -> bool:
        return any(row.get("status") in MEASURED for row in self.rows)

    @property
    def names(self) -> Sequence[Column]:
        shown = ["status" in (column.key, column.instead) for column in self.columns]
        return self.columns[: shown.index(True)] if True in shown else ()

    def filled(self, *, wide: bool = True) -> list[Column]:
        """Return the columns for which some row has something to show."""
        keys = {key for row in self.rows for key, value in row.items() if value is not None}
        shown = (column for column in self.columns if wide or not column.wide)
        return [column for column in shown if column.key in keys or column.instead in keys]

    def name(self, row: Mapping[str, Any]) -> str:
        return " ".join(column.text(row) for column in self.names if row.get(column.key) is not None)

    def explained(self, shown: Sequence[Column]) -> list[str]:
        """Return the notes below a table of these columns."""
        meanings = "; ".join(f"{column.header}: {column.note}" for column in shown if column.note)
        return [*self.notes, *([meanings] if meanings else [])]

    def named(self, rows: Rows, reason: Callable[[Mapping[str, Any]], str | None]) -> dict[str, list[str]]:
        """Return reason -> the names of the rows that have it."""
        found: dict[str, list[str]] = {}
        for row in rows:
            if why := reason(row):
                found.setdefault(why, []).append(self.name(row))
        return found

    @property
    def not_measured(self) -> dict[str, list[str]]:
        """The reasons of rows without a measurement that are not wrong."""
        return self.named(self.rows, lambda row: None if row.get("status") in WRONG else _reason(row))


def summary_of(bench: Any, rows: Rows) -> Summary:
    """Return the summary of a bench's rows, with what is wrong or was not checked in any of them.

    Args:
        bench: a module. It may declare COLUMNS, TITLE, NOTES, ABOUT (keys that are told once if all rows have the
            same value), EACH (a key: the best rows are named for each of its values), functions of the rows (`shown`
            in the table, `findings`, `tables`), and `competes(row)`: whether a row can be best.
    """
    every = {key: None for row in rows for key, value in row.items() if not isinstance(value, list | dict)}
    columns = getattr(bench, "COLUMNS", [Column(key, key, ".4g") for key in every])
    title = getattr(bench, "TITLE", bench.__name__.rpartition(".")[2])
    shown = bench.shown(rows) if hasattr(bench, "shown") else rows
    summary = Summary(title, columns, shown)
    about = {key: list({row.get(key) for row in rows} - {None}) for key in getattr(bench, "ABOUT", ())}
    findings = bench.findings(shown) if hasattr(bench, "findings") else ()
    competes = getattr(bench, "competes", lambda row: True)
    bases = dict.fromkeys(row["mfu_basis"] for row in rows if row.get("mfu_basis"))
    notes = [*getattr(bench, "NOTES", ()), *(f"MFU: share of the {basis}" for basis in bases)]
    if any(len(row.get("samples_ms") or [0] * FEWEST_PAIRS) < FEWEST_PAIRS for row in rows):
        notes.append(f"fewer than {FEWEST_PAIRS} samples give no interval: differences may be chance")
    wrong = summary.named(rows, lambda row: _reason(row) if row.get("status") in WRONG else None)
    unchecked = summary.named(rows, lambda row: row.get(UNCHECKED))
    return replace(
        summary,
        about=", ".join(f"{key.replace('_', ' ')} {of[0]}" for key, of in about.items() if len(of) == 1),
        findings=[*_best(summary, getattr(bench, "EACH", ""), competes), *findings, *_comparisons(summary)],
        tables=bench.tables(rows) if hasattr(bench, "tables") else {},
        notes=[*notes, *(f"not checked: {'; '.join(names)}: {why}" for why, names in unchecked.items())],
        wrong=[f"{'; '.join(names)}: {reason}." for reason, names in wrong.items()],
    )


def _best(summary: Summary, each: str, competes: Callable[[Mapping[str, Any]], bool]) -> list[str]:
    """Return the sentences on the best rows, by every column that says which values are better."""
    found = []
    for column in filter(lambda column: column.better, summary.columns):
        rows = [row for row in summary.rows if row.get(column.key) is not None and competes(row)]
        for members in grouped(rows, lambda row: row.get(each)).values():
            highest = column.better == "higher"
            best = (max if highest else min)(members, key=itemgetter(column.key))
            limit = "Highest" if highest else "Lowest"
            found.append(f"{limit} {column.header}: {column.text(best)}, {summary.name(best)}.")
    return found


def _comparisons(summary: Summary) -> list[str]:
    """Return the sentences on rows that are compared with the first variant (`trainings.measure_figures`)."""
    return [
        f"{summary.name(row)}: {row['versus']} is {row['first_is']:.3f}x as fast (95%: {row['first_is_low']:.3f} to "
        f"{row['first_is_high']:.3f}; {row['verdict']})."
        for row in summary.rows
        if row.get("first_is") is not None
    ]


def picture_of(summary: Summary) -> dict[str, bytes]:
    """Draw the first column that says which values are better; return its key -> PNG, or {} without such a column."""
    column = next((column for column in summary.columns if column.better), None)
    rows = [row for row in summary.rows if row.get("part") in (None, summary.rows[0].get("part"))]
    names = [name for name in summary.names if len({name.text(row) for row in rows}) > 1]
    if column is None or not names:
        return {}
    *groups, last = names
    key, scale = column.key, column.scale
    picture = grouped_bars(
        [row | ({key: row[key] / scale} if row.get(key) is not None else {}) for row in rows],
        column,
        group=lambda row: ", ".join(name.text(row) for name in groups or names),
        series=last.key if groups else None,
        title=summary.title + (f": {summary.about}" if summary.about else ""),
        x_label=", ".join(name.header for name in groups or names),
    )
    return {key: picture}


def _reason(row: Mapping[str, Any]) -> str | None:
    """Return `status: detail` of a row without a measurement, else None."""
    if row.get("status") in MEASURED:
        return None
    return ": ".join(str(row[key]) for key in ("status", "detail") if row.get(key))


def terminal_text(summary: Summary) -> str:
    """Return what is wrong, the table, the reasons of rows without a measurement, and the notes."""
    shown = summary.filled(wide=False)
    below = (*_first(list(summary.not_measured)), *summary.explained(shown))
    above, under = (
        "".join(f"{textwrap.fill(line, TERMINAL_WIDTH)}\n" for line in lines)
        for lines in (_first(summary.wrong), below)
    )
    return above + terminal_table(summary.rows, shown) + under


def _first(lines: Sequence[str]) -> list[str]:
    more = len(lines) - REASONS_SHOWN
    return [*lines[:REASONS_SHOWN], *([f"and {more} more of these: see the report"] if more > 0 else [])]


def report_text(summary: Summary, environment: Mapping[str, Any], files: Iterable[str]) -> str:
    """Return the Markdown report of one bench, with the pictures among the files in its folder."""
    shown = (f"![{name}]({name})" for name in files if name.endswith(".png"))
    return document(f"# {summary.title}", *report_body(summary, environment), *shown)


def report_body(summary: Summary, environment: Mapping[str, Any], level: int = 2) -> list[str]:
    """Return the paragraphs of a report below its title; `level` is that of their headings."""
    heading = "#" * level
    about = f"{summary.about}. " if summary.about else ""
    parts = [f"{about}Measured on {machine(environment)}."]
    if limits := environment.get("limits"):
        parts.append(f"{limits_sentence(limits)}.")
    if found := [*summary.wrong, *summary.findings]:
        parts += [f"{heading} What was found", bullets(found)]
    if columns := summary.filled():
        table = markdown_table(summary.rows, columns)
        parts += [f"{heading} Results", table, bullets(summary.explained(columns))]
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
    return "\n".join(f"- {sentence}" for sentence in sentences)


def document(*paragraphs: str) -> str:
    """Join paragraphs by empty lines."""
    return "\n\n".join(text.strip("\n") for text in paragraphs if text.strip()) + "\n"
