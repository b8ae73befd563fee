"""`lmkit compare A B`: two results of one bench, row by row."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmkit.errors import UsageError
from lmkit.measure.comparison import COLUMNS, compare_rows
from lmkit.measure.tables import terminal_table
from lmkit.reports.results import read_rows


@dataclass(frozen=True)
class Compared:
    """`worse`: how many measurements became slower, fail now, or are missing."""

    rows: list[dict[str, Any]]
    worse: int

    def __str__(self) -> str:
        verdict = f"{self.worse} of {len(self.rows)} became worse" if self.worse else "nothing became worse"
        return terminal_table(self.rows, COLUMNS) + verdict


def run(before: Path, after: Path, *, threshold: float) -> Compared:
    """Compare the rows of two result files or folders.

    Raises:
        UsageError: there is no result file, or several and it is not clear which.
        LmkitError: a file is not JSON lines.
    """
    comparison = compare_rows(_rows(before), _rows(after), smallest_difference=threshold)
    return Compared(comparison.rows, comparison.worse)


def _rows(path: Path) -> list[dict[str, Any]]:
    file = path
    if path.is_dir():
        found = sorted(path.glob("*.jsonl"))
        if len(found) != 1:
            names = ", ".join(file.name for file in found) or "none"
            raise UsageError(f"{path}: needs one .jsonl file, has {names}", hint="name the file itself")
        file = found[0]
    rows = read_rows(file)
    if not rows:
        raise UsageError(f"{file}: holds no results", hint="results of a bench are JSON lines")
    return rows
