"""Rows as they come: what a long bench has measured so far, should it be killed before it writes its files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmkit.bench.rows import read_rows
from lmkit.measure.tables import json_lines
from lmkit.storage.atomic import write_atomic


@dataclass(frozen=True)
class Journal:
    """JSON lines that grow; several processes may write to one.

    Whoever stores the finished results removes the file. Its name ends in `.partial`, which git ignores.
    """

    path: Path

    def start(self) -> None:
        """Forget what an earlier, killed run left."""
        self.path.unlink(missing_ok=True)

    def has_rows(self) -> bool:
        return self.path.exists() and self.path.stat().st_size > 0

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json_lines(rows))  # one write: lines of several processes do not mix

    def replace(self, rows: Sequence[dict[str, Any]]) -> None:
        """`rows` instead of all that was added, for a bench whose rows grow; one process at a time."""
        write_atomic(self.path, json_lines(rows))

    def rows(self) -> list[dict[str, Any]]:
        """What was added since the start.

        Raises:
            LmkitError: somebody else wrote to the file.
        """
        if not self.path.exists():
            return []
        return read_rows(self.path)
