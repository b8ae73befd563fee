"""Two result files of the same bench, row by row: what became faster, slower, or stopped working."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmkit.measure.statistics import median, unpaired_ratio
from lmkit.measure.tables import Column, Row

SAMPLES = (("samples_ms", 1.0), ("samples_s", 1e3))  # key, factor to milliseconds
# Results, though they are text or whole numbers: they do not say which measurement a row is.
RESULT_KEYS = frozenset(
    [
        "status",
        "detail",
        "verdict",
        "repeats",
        "epochs",
        "calls_per_sample",
        "calls_per_step",
        "clock",
        "mfu_basis",
        "best_sdpa",
        "versus_fp32_verdict",
        "versus_sdpa_verdict",
        "implementation",
    ]
)
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
class Comparison:
    """One row per measurement that either file has; `worse` counts the slower, failing and missing ones."""

    rows: list[dict[str, Any]]
    worse: int


def compare_rows(
    before: Sequence[Row], after: Sequence[Row], *, smallest_difference: float = 0.05
) -> Comparison:
    """Match rows by everything that is not a result, and compare their raw samples.

    Args:
        smallest_difference: what two runs of the same thing may differ by; below it nothing is called a difference.
    """
    old = {identity(row): row for row in before}
    new = {identity(row): row for row in after}
    keys = list(dict.fromkeys([*old, *new]))
    varying = _varying_keys(keys)
    rows, worse = [], 0
    for key in keys:
        row = _compare(old.get(key), new.get(key), smallest_difference)
        row["what"] = " ".join(str(value) for name, value in key if name in varying) or "all"
        worse += row["verdict"] in ("slower", "stopped working", "missing")
        rows.append(row)
    return Comparison(rows, worse)


def identity(row: Row) -> tuple[tuple[str, Any], ...]:
    """The sorted (key, value) pairs that say what was measured: text, whole numbers and switches."""
    return tuple(
        sorted(
            (key, value)
            for key, value in row.items()
            if key not in RESULT_KEYS and isinstance(value, (str, int)) and not key.endswith("_bytes")
        )
    )


def _varying_keys(keys: Sequence[tuple[tuple[str, Any], ...]]) -> set[str]:
    """Names that differ between rows: the rest would only repeat itself in the table."""
    values: dict[str, set[Any]] = {}
    for key in keys:
        for name, value in key:
            values.setdefault(name, set()).add(value)
    return {name for name, found in values.items() if len(found) > 1}


def _samples_ms(row: Row) -> list[float]:
    return next(([sample * factor for sample in row[key]] for key, factor in SAMPLES if row.get(key)), [])


def _compare(old: Row | None, new: Row | None, smallest_difference: float) -> dict[str, Any]:
    before, after = (_samples_ms(row) if row else [] for row in (old, new))
    if old is None or new is None:
        return {"verdict": "new" if old is None else "missing"}
    if not before or not after:
        same = bool(before) == bool(after)
        return {"verdict": "not measured" if same else "stopped working" if before else "works now"}
    ratio = unpaired_ratio(after, before, smallest_difference=smallest_difference)
    return {
        "before_ms": median(before),
        "after_ms": median(after),
        "speedup": ratio.speedup,
        "low": ratio.low,
        "high": ratio.high,
        "verdict": ratio.verdict,
    }
