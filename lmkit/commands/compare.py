"""`lmkit compare A B`: two results of one bench, row by row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmkit.bench.compare import COLUMNS, compare_rows
from lmkit.bench.rows import read_rows
from lmkit.errors import UsageError
from lmkit.measure.tables import terminal_table


@dataclass(frozen=True)
class Compared:
    """What became of every measurement.

    Attributes:
        compared: how many have a verdict on their times: measured in both, often enough.
        worse: how many became slower, fail now, or are missing.
    """

    rows: list[dict[str, Any]]
    compared: int
    worse: int

    def __str__(self) -> str:
        if self.worse:
            verdict = f"{self.worse} of {len(self.rows)} became worse"
        elif self.compared:
            verdict = f"nothing became worse ({self.compared} of {len(self.rows)} compared)"
        else:
            verdict = "nothing was compared: no measurement has samples enough in both"
        return terminal_table(self.rows, COLUMNS) + verdict

    @property
    def is_fine(self) -> bool:
        """Something was compared, and nothing became worse."""
        return self.compared > 0 and self.worse == 0


def run(before: Path, after: Path, *, threshold: float) -> Compared:
    """Compare the rows of two result files or folders.

    Raises:
        UsageError: there is no result file, or several and it is not clear which; nothing was measured in both; a
            threshold that is no number.
        LmkitError: a file is not JSON lines, or a row has a field of another type.
    """
    if not math.isfinite(threshold):
        raise UsageError(f"--threshold: {threshold} is not a share", hint="0.05 lets 5% pass")
    comparison = compare_rows(_rows(before), _rows(after), smallest_difference=threshold)
    if all(row["verdict"] in ("new", "missing") for row in comparison.rows):
        raise UsageError(
            f"{after}: no measurement of {before} is in it",
            hint="compare two results of the same bench and recipe",
        )
    compared = sum(row["verdict"] in ("faster", "slower", "no difference") for row in comparison.rows)
    return Compared(comparison.rows, compared, comparison.worse)


def _rows(path: Path) -> list[dict[str, Any]]:
    file = path
    if path.is_dir():
        found = sorted(path.glob("*.jsonl"))
        if len(found) != 1:
            names = ", ".join(file.name for file in found) or "none"
            raise UsageError(f"{path}: needs one .jsonl file, has {names}", hint="name the file itself")
        file = found[0]
    rows = read_rows(file, complete=False)  # perhaps those of an older version
    if not rows:
        raise UsageError(f"{file}: holds no results", hint="results of a bench are JSON lines")
    return rows
