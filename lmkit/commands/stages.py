"""Which stages of a run are up to date.

Each stage has a key: a hash of the recipe tables it reads and of the key of the stage before it. A stage whose
recorded key has not changed, that finished, and whose outputs are still there, is skipped. The record is
`stages.json` in the run folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmkit.errors import UsageError
from lmkit.storage import write_atomic


def stage_key(name: str, *inputs: Any) -> str:
    """A hash of everything that a stage's result depends on (JSON values)."""
    return hashlib.sha256(json.dumps([name, *inputs], sort_keys=True).encode()).hexdigest()


def file_signature(paths: Sequence[Path]) -> list[tuple[str, int, int]]:
    """Name, size and modification time of files: changes when they do, without reading them.

    Raises:
        UsageError: a file is missing.
    """
    signature = []
    for path in paths:
        if not path.is_file():
            raise UsageError(
                f"{path}: no such file", hint="check corpus.train, corpus.valid and tokenizer.path"
            )
        facts = path.stat()
        signature.append((str(path), facts.st_size, facts.st_mtime_ns))
    return signature


class StageRecord:
    """What is known of the stages of one run; every change is on disk before the call returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: dict[str, dict[str, Any]] = {}
        if path.exists():
            try:
                self._entries = json.loads(path.read_text("utf-8"))
            except ValueError:
                # Written atomically, so a broken record was damaged from outside: all stages are then out of date.
                self._entries = {}

    def finished(self, stage: str, key: str, outputs: Sequence[Path]) -> bool:
        """True where the stage needs no work."""
        entry = self._entries.get(stage, {})
        return (
            entry.get("key") == key and entry.get("done") is True and all(path.exists() for path in outputs)
        )

    def begun(self, stage: str, key: str) -> bool:
        """True where an earlier, interrupted attempt at the same work can be taken up."""
        return self._entries.get(stage, {}).get("key") == key

    def begin(self, stage: str, key: str) -> None:
        """Note that work on a stage starts."""
        self._entries[stage] = {"key": key, "done": False}
        self._save()

    def finish(self, stage: str, key: str, seconds: float) -> None:
        """Note that a stage is complete."""
        self._entries[stage] = {"key": key, "done": True, "seconds": round(seconds, 3)}
        self._save()

    def _save(self) -> None:
        write_atomic(self.path, json.dumps(self._entries, indent=1) + "\n")
