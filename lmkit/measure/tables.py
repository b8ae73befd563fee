"""Write rows as JSON lines, CSV, Markdown, and text for a terminal."""

from __future__ import annotations

import csv
import io
import json
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
TERMINAL_WIDTH = 100
MISSING = "-"
Rows = list[dict[str, Any]]
"""One dict per measurement, JSON types only."""


@dataclass(frozen=True)
class Column:
    """One column of a table for people.

    Attributes:
        key: of the row.
        header: what stands above, with the unit: "ms", "GB (10^9)".
        spec: format spec for numbers, such as ".3f", ",d", ".1%".
        instead: key of what to show where there is no value ("status": why there is none).
    """

    key: str
    header: str
    spec: str = ""
    instead: str = ""

    def text(self, row: Row) -> str:
        value = row.get(self.key)
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return str(row.get(self.instead, MISSING)) if self.instead else MISSING
        if self.spec and isinstance(value, (int, float)) and not isinstance(value, bool):
            return format(value, self.spec)
        return str(value)


def json_lines(rows: Sequence[Row]) -> str:
    """Return one strict JSON object per line; NaN and infinities become null."""
    return "".join(json.dumps(_finite(row), allow_nan=False) + "\n" for row in rows)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def csv_text(rows: Sequence[Row], keys: Sequence[str] | None = None) -> str:
    """Return CSV (RFC 4180) with a header line. All keys in order of first appearance by default; lists are left out.

    (Raw samples are lists: they stay in the JSON lines.)
    """
    if keys is None:
        found: dict[str, None] = {}
        for row in rows:
            found.update(
                (key, None) for key, value in row.items() if not isinstance(value, (list, tuple, Mapping))
            )
        keys = list(found)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(keys)
    for row in rows:
        writer.writerow(["" if row.get(key) is None else row[key] for key in keys])
    return out.getvalue()


def markdown_table(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """Return a GitHub table; numbers to the right."""
    aligned = [_is_numeric(rows, column) for column in columns]
    lines = [
        "| " + " | ".join(_escape(column.header) for column in columns) + " |",
        "|" + "|".join("-:" if right else ":-" for right in aligned) + "|",
    ]
    lines += ["| " + " | ".join(_escape(column.text(row)) for column in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def terminal_table(rows: Sequence[Row], columns: Sequence[Column], *, width: int = TERMINAL_WIDTH) -> str:
    """Return aligned text of at most `width` characters: where that is too little, headers are cut with an ellipsis,
    then text, the widest first; numbers never, which may make it wider."""
    cells = [[column.header for column in columns]] + [
        [column.text(row) for column in columns] for row in rows
    ]
    right = [_is_numeric(rows, column) for column in columns]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    gap = 2
    room = width - gap * (len(columns) - 1)
    content = [max((len(line[index]) for line in cells[1:]), default=0) for index in range(len(columns))]
    # Headers first, while they can be guessed.
    _shrink(widths, [max(8, longest) for longest in content], room)
    _shrink(
        widths,
        [max(4, longest) if number else 4 for longest, number in zip(content, right, strict=True)],
        room,
    )

    def line_of(texts: Sequence[str]) -> str:
        parts = []
        for text, cell_width, to_right in zip(texts, widths, right, strict=True):
            cut = text if len(text) <= cell_width else text[: cell_width - 1] + "…"
            parts.append(cut.rjust(cell_width) if to_right else cut.ljust(cell_width))
        return (" " * gap).join(parts).rstrip()

    rule = (" " * gap).join("-" * cell_width for cell_width in widths)
    return "\n".join([line_of(cells[0]), rule, *(line_of(line) for line in cells[1:])]) + "\n"


def _shrink(widths: list[int], least: Sequence[int], room: int) -> None:
    """Take from the widest until the sum fits, from none below its least."""
    while sum(widths) > room:
        wider = [index for index in range(len(widths)) if widths[index] > least[index]]
        if not wider:
            return
        widths[max(wider, key=lambda index: widths[index])] -= 1


def _is_numeric(rows: Sequence[Row], column: Column) -> bool:
    values = [row.get(column.key) for row in rows]
    present = [value for value in values if value is not None]
    return bool(present) and all(
        isinstance(value, (int, float)) and not isinstance(value, bool) for value in present
    )


def picture_lines(files: Iterable[str]) -> list[str]:
    """Return Markdown that shows the pictures among files in the folder of the report."""
    return [f"![{name}]({name})" for name in files if name.endswith(".png")]


def row_files(stem: str, rows: Sequence[dict[str, Any]]) -> dict[str, bytes | str]:
    """Return `<stem>.jsonl` (everything, raw samples included) and `<stem>.csv` (scalars) of the rows."""
    return {f"{stem}.jsonl": json_lines(rows), f"{stem}.csv": csv_text(rows)}


def wrote(folder: str, files: Sequence[str]) -> str:
    """Return `wrote FOLDER: a, b, ...` in lines that fit a terminal; no name is broken."""
    return enumeration(f"wrote {folder}", files)


def enumeration(what: str, items: Sequence[str]) -> str:
    """Return `what: a, b, ...` in lines that fit a terminal, broken between words."""
    text = ", ".join(items)
    head = f"{what}: "
    first_line = "" if len(head + text.partition(" ")[0]) <= TERMINAL_WIDTH else f"{what}:\n"
    return first_line + textwrap.fill(
        text,
        TERMINAL_WIDTH,
        initial_indent="  " if first_line else head,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def statement(what: str, facts: str) -> str:
    """Return `what: facts`; the facts in a line of their own if a terminal is too narrow for both."""
    line = f"{what}: {facts}"
    return line if len(line) <= TERMINAL_WIDTH else f"{what}:\n  {facts}"


def megabytes(num_bytes: int) -> str:
    """Return bytes as MB (10^6), or as kB (10^3) below a tenth of one."""
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:.1f} kB"
