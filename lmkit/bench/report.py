"""The result of a bench: rows, and the files to store."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmkit.measure.tables import TERMINAL_WIDTH, Column, Rows, terminal_table

NOT_MEASURED = ("unsupported", "out of memory", "skipped", "failed", "wrong result")
"""The `status` of a row without a measurement; its `detail` says why there is none."""

REASONS_SHOWN = 3


@dataclass(frozen=True)
class BenchResult:
    """The outcome of one bench.

    Attributes:
        name: the bench, as in `lmkit bench <name>`.
        rows: what did not fit is a row with `status` "out of memory".
        columns: how to show the rows in a terminal.
        files: name -> content (text, or bytes of a PNG), to be stored in the output folder.
        environment: content of `environment.json`.
        notes: sentences for below the table (which limit, which baseline).
        shown: the rows that the terminal's table shows; None: all.
    """

    name: str
    rows: Rows
    columns: Sequence[Column]
    files: dict[str, bytes | str]
    environment: dict[str, Any]
    notes: tuple[str, ...] = ()
    shown: Sequence[dict[str, Any]] | None = None

    @property
    def measured(self) -> bool:
        """Whether any row of the table has a measurement; also true of a table without rows."""
        rows = self._table_rows()
        return not rows or any(row.get("status") not in NOT_MEASURED for row in rows)

    def table(self) -> str:
        """The rows as text of at most 100 columns; below them why some have no measurement, and the notes."""
        rows = self._table_rows()
        below = [*_reasons(rows), *self.notes]
        return terminal_table(rows, self.columns) + "".join(
            f"{textwrap.fill(line, TERMINAL_WIDTH)}\n" for line in below
        )

    def _table_rows(self) -> Sequence[dict[str, Any]]:
        return self.rows if self.shown is None else self.shown


def _reasons(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Why rows have no measurement, the first few in full; a report has them all."""
    reasons = list(
        dict.fromkeys(
            f"{row['status']}: {row['detail']}"
            for row in rows
            if row.get("status") in NOT_MEASURED and row.get("detail")
        )
    )
    more = len(reasons) - REASONS_SHOWN
    return reasons[:REASONS_SHOWN] + ([f"and {more} more of these: see the report"] if more > 0 else [])
