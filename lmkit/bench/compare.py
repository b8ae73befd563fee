"""`lmkit compare`: two result files of one bench, row by row: what became faster, slower, or stopped working."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmkit.bench.report import read_rows
from lmkit.errors import LmkitError, UsageError
from lmkit.measure.statistics import median, unpaired_ratio
from lmkit.measure.tables import Column, Rows, terminal_table

# Results, though they are text or whole numbers: they do not say which measurement a row is.
RESULT_KEYS = {
    *(
        "status",
        "detail",
        "repeats",
        "rounds",
        "epochs",
        "calls_per_sample",
        "calls_per_step",
        "clock",
        "mfu_basis",
    ),
    *("verdict", "versus_fp32_verdict", "versus_sdpa_verdict", "best_sdpa", "implementation"),
}
COLUMNS = (
    Column("what", "what"),
    Column("before_ms", "before ms", ".4g"),
    Column("after_ms", "after ms", ".4g"),
    Column("speedup", "speedup", ".3f"),
    Column("low", "95% from", ".3f"),
    Column("high", "to", ".3f"),
    Column("verdict", "verdict"),
)


@dataclass(frozen=True)
class Compared:
    """One row per measurement that either file has.

    Attributes:
        compared: how many have a verdict on their times: measured in both, often enough.
        worse: how many became slower, fail now, or are missing.
    """

    rows: Rows
    compared: int
    worse: int

    def __str__(self) -> str:
        if self.worse:
            verdict = f"{self.worse} of {len(self.rows)} became worse"
        elif self.compared:
            verdict = f"nothing became worse ({self.compared} of {len(self.rows)} compared)"
        else:
            verdict = "nothing was compared: no measurement has enough samples in both"
        return terminal_table(self.rows, COLUMNS) + verdict

    @property
    def is_fine(self) -> bool:
        """Whether something was compared and nothing became worse."""
        return self.compared > 0 and self.worse == 0


def compare_files(before: Path, after: Path, *, threshold: float) -> Compared:
    """Compare the rows of two result files or folders.

    Args:
        threshold: what two runs of the same thing may differ by.

    Raises:
        UsageError: no result file, or several; no measurement is in both; a threshold that is not finite.
        LmkitError: a file is damaged.
    """
    if not math.isfinite(threshold):
        raise UsageError(
            "compare.threshold", f"--threshold: {threshold} is not a share", hint="0.05 lets 5% pass"
        )
    old, new = _rows(before), _rows(after)
    try:
        compared = compare_rows(old, new, smallest_difference=threshold)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise LmkitError(
            "rows.damaged",
            f"{before} or {after}: samples are not positive numbers ({error})",
            hint="run the bench that wrote the file again",
        ) from None
    if all(row["verdict"] in ("new", "missing") for row in compared.rows):
        raise UsageError(
            "compare.nothing_in_common",
            f"{after}: no measurement of {before} is in it",
            hint="compare two results of the same bench and recipe",
        )
    return compared


def _rows(path: Path) -> Rows:
    file = path
    if path.is_dir():
        found = sorted(path.glob("*.jsonl"))
        if len(found) != 1:
            names = ", ".join(file.name for file in found) or "none"
            raise UsageError(
                "compare.which_file",
                f"{path}: needs one .jsonl file, has {names}",
                hint="name the file itself",
            )
        file = found[0]
    rows = read_rows(file)
    if not rows:
        raise UsageError(
            "compare.no_rows", f"{file}: holds no results", hint="results of a bench are JSON lines"
        )
    return rows


def compare_rows(
    before: Sequence[Mapping[str, Any]],
    after: Sequence[Mapping[str, Any]],
    *,
    smallest_difference: float = 0.05,
) -> Compared:
    """Match rows by everything that is not a result, and compare their raw samples."""
    old = {identity(row): row for row in before}
    new = {identity(row): row for row in after}
    keys = list(dict.fromkeys([*old, *new]))
    values: dict[str, set[Any]] = {}
    for name, value in (pair for key in keys for pair in key):
        values.setdefault(name, set()).add(value)
    rows = []
    for key in keys:
        # What all rows share would only repeat itself.
        what = " ".join(str(value) for name, value in key if len(values[name]) > 1) or "all"
        rows.append({"what": what} | _compare(old.get(key), new.get(key), smallest_difference))
    verdicts = [row["verdict"] for row in rows]
    return Compared(
        rows,
        compared=sum(verdict in ("faster", "slower", "no difference") for verdict in verdicts),
        worse=sum(verdict in ("slower", "stopped working", "missing") for verdict in verdicts),
    )


def identity(row: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return the sorted (key, value) pairs that say what was measured: text, whole numbers and switches."""
    told = {key for key, value in row.items() if isinstance(value, (str, int)) and not key.endswith("_bytes")}
    return tuple(sorted((key, row[key]) for key in told - RESULT_KEYS))


def _compare(
    old: Mapping[str, Any] | None, new: Mapping[str, Any] | None, smallest_difference: float
) -> dict[str, Any]:
    if old is None or new is None:
        return {"verdict": "new" if old is None else "missing"}
    before, after = _samples_ms(old), _samples_ms(new)
    if not before or not after:
        same = bool(before) == bool(after)
        return {"verdict": "not measured" if same else "stopped working" if before else "works now"}
    ratio = unpaired_ratio(after, before, smallest_difference=smallest_difference)
    found = {"before_ms": median(before), "after_ms": median(after), "speedup": ratio.speedup}
    return found | {"low": ratio.low, "high": ratio.high, "verdict": ratio.verdict}


def _samples_ms(row: Mapping[str, Any]) -> list[float]:
    return row.get("samples_ms") or [sample * 1e3 for sample in row.get("samples_s") or ()]
