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


def file_signature(paths: Sequence[Path], *, key: str) -> list[tuple[str, int, int]]:
    """Name, size and modification time of the files that a recipe's `key` names: changes when they do, without
    reading them.

    Raises:
        UsageError: a file is missing.
    """
    signature = []
    for path in paths:
        if not path.is_file():
            raise UsageError(
                f"{path}: no such file (key {key})", hint="paths in a recipe begin at the folder you are in"
            )
        facts = path.stat()
        signature.append((str(path), facts.st_size, facts.st_mtime_ns))
    return signature


def _is_entry(entry: Any) -> bool:
    """Whether it is what `begin` or `finish` writes."""
    if not isinstance(entry, dict) or not isinstance(entry.get("key"), str):
        return False
    outputs = entry.get("outputs", {} if entry.get("done") is False else None)
    return isinstance(outputs, dict) and all(
        isinstance(paths, list) and all(isinstance(path, str) and "\0" not in path for path in paths)
        for paths in outputs.values()
    )


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:  # a name that is too long, say
        return False


class StageRecord:
    """What is known of the stages of one run; every change is on disk before the call returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: dict[str, dict[str, Any]] = {}
        if path.exists():
            try:
                content = json.loads(path.read_text("utf-8"))
            except (ValueError, RecursionError):
                content = None
            # Written atomically, so what is broken was damaged from outside: that stage is then out of date.
            entries = content.items() if isinstance(content, dict) else ()
            self._entries = {stage: entry for stage, entry in entries if _is_entry(entry)}

    def finished(self, stage: str, key: str) -> bool:
        """True where the stage needs no work: same key, completed, and everything it made still there."""
        entry = self._entries.get(stage, {})
        return (
            entry.get("key") == key
            and entry.get("done") is True
            and all(_exists(path) for paths in entry["outputs"].values() for path in paths)
        )

    def outputs(self, stage: str) -> dict[str, list[Path]]:
        """What a finished stage made: role -> files."""
        return {
            role: [Path(path) for path in paths] for role, paths in self._entries[stage]["outputs"].items()
        }

    def made(self, stage: str) -> bool:
        """True where the stage was completed at some time, up to date or not."""
        return self._entries.get(stage, {}).get("done") is True

    def begun(self, stage: str, before: str) -> bool:
        """True where an earlier attempt, finished or not, started from the same results of the stage before.

        Args:
            before: the key of the stage before.
        """
        return self._entries.get(stage, {}).get("before") == before

    def begin(self, stage: str, key: str, before: str = "") -> None:
        """Note that work on a stage starts."""
        self._entries[stage] = {"key": key, "before": before, "done": False}
        self._save()

    def finish(self, stage: str, key: str, outputs: dict[str, list[Path]]) -> None:
        """Note that a stage is complete, and what it made."""
        files = {role: [str(path) for path in paths] for role, paths in outputs.items()}
        before = self._entries.get(stage, {}).get("before", "")
        self._entries[stage] = {"key": key, "before": before, "done": True, "outputs": files}
        self._save()

    def forget(self, stage: str) -> None:
        """Drop a stage: it is out of date from now on."""
        if self._entries.pop(stage, None) is not None:
            self._save()

    def _save(self) -> None:
        write_atomic(self.path, json.dumps(self._entries, indent=1) + "\n")
