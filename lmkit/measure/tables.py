"""Write rows as JSON lines, CSV, Markdown, and text for a terminal."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

Key = TypeVar("Key")
Row = Mapping[str, Any]
TERMINAL_WIDTH = 100
MISSING = "-"
Rows = list[dict[str, Any]]
"""One dict per measurement, JSON types only."""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class Column:
    """One column of a table for people.

    Attributes:
        header: what stands above, with the unit: "ms", "GB (10^9)".
        spec: format spec for numbers, such as ".3f", ",d", ".1%".
        instead: key of what to show where there is no value ("status": why there is none).
        note: for the notes below a table that shows it.
        axis: its name on the axis of a picture, with the unit; by default the header.
        scale: what a value is divided by where it is shown.
        better: "higher" or "lower" of a figure whose best rows a report names.
        wide: for reports only; a terminal has no room for it.
    """

    key: str
    header: str
    spec: str = ""
    instead: str = ""
    note: str = ""
    axis: str = ""
    scale: float = 1.0
    better: str = ""
    wide: bool = False

    def text(self, row: Row) -> str:
        value = row.get(self.key)
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            return str(row.get(self.instead, MISSING)) if self.instead else MISSING
        if self.scale != 1.0:
            value = value / self.scale
        return format(value, self.spec) if self.spec and _is_number(value) else str(value)

    def is_numeric(self, rows: Sequence[Row]) -> bool:
        present = [row[self.key] for row in rows if row.get(self.key) is not None]
        return bool(present) and all(map(_is_number, present))


def grouped(rows: Rows, key: Callable[[dict[str, Any]], Key]) -> dict[Key, Rows]:
    """Return the rows by key, both in the order in which they came."""
    groups: dict[Key, Rows] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def json_lines(rows: Sequence[Row]) -> str:
    """Return one strict JSON object per line; NaN and infinities become null."""
    return "".join(json.dumps(finite(row), allow_nan=False) + "\n" for row in rows)


def finite(value: Any) -> Any:
    """Return a value that strict JSON can hold: NaN and infinities, at any depth, become None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def csv_text(rows: Sequence[Row]) -> str:
    """Return CSV (RFC 4180) of the scalars; keys as they first appear, NaN and infinities empty."""
    scalars = [
        {key: finite(value) for key, value in row.items() if not isinstance(value, list | tuple | Mapping)}
        for row in rows
    ]
    out = io.StringIO()
    keys = dict.fromkeys(key for row in scalars for key in row)
    writer = csv.DictWriter(out, list(keys), lineterminator="\n")
    writer.writeheader()
    writer.writerows(scalars)
    return out.getvalue()


def row_files(stem: str, rows: Sequence[dict[str, Any]]) -> dict[str, bytes | str]:
    """Return `<stem>.jsonl` (everything, raw samples included) and `<stem>.csv` (scalars) of the rows."""
    return {f"{stem}.jsonl": json_lines(rows), f"{stem}.csv": csv_text(rows)}


def markdown_table(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """Return a GitHub table; numbers to the right."""
    rule = "|".join("-:" if column.is_numeric(rows) else ":-" for column in columns)
    header, *lines = [
        "| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in texts) + " |"
        for texts in _cells(rows, columns)
    ]
    return "\n".join([header, f"|{rule}|", *lines]) + "\n"


def terminal_table(rows: Sequence[Row], columns: Sequence[Column], *, width: int | None = None) -> str:
    """Return aligned text of at most `width` characters, by default `TERMINAL_WIDTH` if stdout is a terminal.

    Where that is too narrow, headers are cut with an ellipsis, then text, the widest first. Numbers are never cut, so
    that the text may be wider.
    """
    if width is None:
        width = TERMINAL_WIDTH if sys.stdout is not None and sys.stdout.isatty() else sys.maxsize
    right = [column.is_numeric(rows) for column in columns]
    cells = _cells(rows, columns)
    widths = [max(map(len, texts)) for texts in zip(*cells, strict=True)]
    content = [max(map(len, texts), default=0) for _, *texts in zip(*cells, strict=True)]
    least_of_headers = [max(8, longest) for longest in content]
    least_of_text = [max(4, longest) if number else 4 for longest, number in zip(content, right, strict=True)]
    room = width - 2 * (len(columns) - 1)
    for least in (least_of_headers, least_of_text):
        while sum(widths) > room and (wider := [i for i, own in enumerate(widths) if own > least[i]]):
            widths[max(wider, key=widths.__getitem__)] -= 1

    def fitted(text: str, most: int, to_right: bool) -> str:
        cut = text if len(text) <= most else text[: most - 1] + "…"
        return cut.rjust(most) if to_right else cut.ljust(most)

    lines = ["  ".join(map(fitted, texts, widths, right)).rstrip() for texts in cells]
    return "\n".join([lines[0], "  ".join("-" * most for most in widths), *lines[1:]]) + "\n"


def _cells(rows: Sequence[Row], columns: Sequence[Column]) -> list[list[str]]:
    headers = [column.header for column in columns]
    return [headers, *([column.text(row) for column in columns] for row in rows)]


def enumeration(what: str, items: Sequence[str]) -> str:
    """Return `what: a, b, ...` in lines that fit a terminal; words are not broken."""
    text = f"{what}: {', '.join(items)}"
    return textwrap.fill(
        text, TERMINAL_WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def statement(what: str, facts: str) -> str:
    """Return `what: facts`; the facts in a line of their own if a terminal is too narrow for both."""
    line = f"{what}: {facts}"
    return line if len(line) <= TERMINAL_WIDTH else f"{what}:\n  {facts}"


def size_of(num_bytes: int) -> str:
    """Return a number of bytes in kB, MB or GB (10^3, 10^6, 10^9)."""
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.2f} GB"
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:.1f} kB"
