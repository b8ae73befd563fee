"""`lmkit compare A B`: two results of one bench, row by row."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmkit.errors import LmkitError, UsageError
from lmkit.measure.comparison import COLUMNS, compare_rows
from lmkit.measure.tables import terminal_table


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
    try:
        text = file.read_text("utf-8")
    except OSError as error:
        raise UsageError(f"{file}: {(error.strerror or str(error)).lower()}", hint="check the path") from None
    except UnicodeDecodeError:
        raise LmkitError(f"{file}: not UTF-8 text", hint="results of a bench are JSON lines") from None
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise LmkitError(
                f"{file}: line {number} is not a JSON object", hint="results of a bench are JSON lines"
            )
        rows.append(row)
    if not rows:
        raise UsageError(f"{file}: holds no results", hint="results of a bench are JSON lines")
    return rows
