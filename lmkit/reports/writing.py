"""What the write-ups share: headings, pictures, and numbers in sentences."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lmkit.reports.results import Results

T = TypeVar("T")
Row = TypeVar("Row")


@dataclass(frozen=True)
class Place:
    """Where a write-up lies and where the results lie, for its links."""

    root: Path
    output: Path

    def link(self, file: Path) -> str:
        """From the write-up to a file below the root."""
        return Path(os.path.relpath(self.root / file, self.output)).as_posix()


def section(results: Results, place: Place, title: str, *, level: int = 2) -> list[str]:
    """A heading, what it was measured on, and the file that holds the rows."""
    source = f"[{results.path.as_posix()}]({place.link(results.path)})"
    return [f"{'#' * level} {title}", f"Measured on {results.machine}. Rows, raw samples included: {source}."]


def in_short(sections: Iterable[tuple[str, Sequence[str]]]) -> list[str]:
    """The head of a write-up: of every section its title and what it found first."""
    return bullets(f"**{title}**: {found[0]}" for title, found in sections if found)


def full_table(results: Results, place: Place, report: str) -> list[str]:
    """Where the table of every row lies, of which a write-up shows a part; nothing where the bench left none."""
    file = results.path.parent / report
    if not (place.root / file).is_file():
        return []
    return [f"Every row in one table: [{file.as_posix()}]({place.link(file)})."]


def titles(chosen: Sequence[Results]) -> dict[Path, str]:
    """What to call each file of rows: its folder, or where several files share one, its path without the ending."""
    folders = Counter(results.path.parent for results in chosen)
    return {
        results.path: (
            results.path.parent if folders[results.path.parent] == 1 else results.path.with_suffix("")
        ).as_posix()
        for results in chosen
    }


def pictures(results: Results, place: Place, *stems: str) -> list[str]:
    """Markdown for those of the named pictures that lie beside the rows."""
    return [
        f"![{name[:-4].replace('_', ' ')}]({place.link(results.path.parent / name)})"
        for stem in stems
        for name in results.pictures
        if name == f"{stem}.png"
    ]


def bullets(sentences: Iterable[str]) -> list[str]:
    """One paragraph: a list, or nothing."""
    listed = [f"- {sentence}" for sentence in sentences]
    return ["\n".join(listed)] if listed else []


def document(*parts: str | Iterable[str]) -> str:
    """Paragraphs, joined by empty lines."""
    paragraphs: list[str] = []
    for part in parts:
        paragraphs += [part] if isinstance(part, str) else part
    return "\n\n".join(paragraph.strip("\n") for paragraph in paragraphs if paragraph.strip()) + "\n"


def grouped(rows: Sequence[Row], key: Callable[[Row], T]) -> dict[T, list[Row]]:
    """Rows by key, both in the order in which they came."""
    groups: dict[T, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def pivot(
    rows: Sequence[dict[str, Any]],
    row_key: Callable[[dict[str, Any]], str],
    column_key: Callable[[dict[str, Any]], Any],
    cell: Callable[[dict[str, Any]], str],
    *,
    corner: str = "",
) -> str:
    """A Markdown table: a line per `row_key`, a column per `column_key`, `cell` where they meet.

    Columns that are numbers ascend; others come in the order in which they are met.
    """
    columns = list(dict.fromkeys(map(column_key, rows)))
    if all(isinstance(column, int | float) for column in columns):
        columns.sort()
    lines = [[corner, *map(str, columns)], [":-"] + ["-:"] * len(columns)]
    for name, members in grouped(rows, row_key).items():
        cells = {column_key(row): cell(row) for row in members}
        lines.append([name, *(cells.get(column, "-") for column in columns)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
