"""Which stages of a run are up to date.

A stage has a key: a hash of the parts of the recipe that it reads and of the key of the stage before it. A stage is
up to date if it finished with the same key and its outputs are still there. The run folder keeps the record.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lmkit.errors import UsageError
from lmkit.recipe.schema import Recipe
from lmkit.storage import write_atomic

Outputs = dict[str, list[Path]]
"""What a stage made: role -> files."""
RECORD = "stages.json"
# What each stage reads besides the results of the stage before it.
READS = {
    "corpus": ("corpus",),
    "tokenizer": ("tokenizer",),
    "encode": (),
    "train": ("run", "data", "model", "optimizer", "train", "parallel"),
    "evaluate": (),
    "generate": ("generate",),
}
FILES = ("corpus.train", "corpus.valid", "tokenizer.path")  # keys that name files which a stage reads
NO_EFFECT = ("tokenizer.workers", "data.workers")  # keys on which no result depends


def stage_keys(recipe: Recipe) -> dict[str, str]:
    """Return a hash of everything that the result of each stage depends on.

    Raises:
        UsageError: a file that the recipe names is missing.
    """
    tables = recipe.model_dump(mode="json")
    for table, key in (dotted.split(".") for dotted in NO_EFFECT):
        del tables[table][key]
    for table, key in (dotted.split(".") for dotted in FILES):
        names = tables[table][key] or []
        paths = [Path(name) for name in ([names] if isinstance(names, str) else names)]
        tables[table][key] = [_signature(path, f"{table}.{key}") for path in paths]
    keys: dict[str, str] = {}
    key = ""
    for stage, names in READS.items():
        inputs = json.dumps([stage, key, *(tables[name] for name in names)], sort_keys=True)
        key = keys[stage] = hashlib.sha256(inputs.encode()).hexdigest()
    return keys


def _signature(path: Path, key: str) -> tuple[str, int, int]:
    """Return name, size and modification time: they change with the content, and reading it is not needed."""
    if not path.is_file():
        raise UsageError(
            "run.missing_file",
            f"{path}: no such file (key {key})",
            hint="paths in a recipe are relative to the current folder",
        )
    facts = path.stat()
    return str(path), facts.st_size, facts.st_mtime_ns


class StageRecord:
    """The stages of one run, on disk: the key of each, the key of the stage before it when it began, its outputs."""

    def __init__(self, folder: Path, keys: Mapping[str, str]) -> None:
        self.path = folder / RECORD
        self.keys = keys
        try:
            content = json.loads(self.path.read_text("utf-8"))
        except (OSError, ValueError, RecursionError):
            content = None
        # It is written atomically: an entry that is not ours was damaged from outside, and its stage is out of date.
        entries = content.items() if isinstance(content, dict) else ()
        self._entries = {stage: entry for stage, entry in entries if _is_entry(entry)}

    def was_made(self, stage: str) -> bool:
        """Return whether the stage finished at some time, up to date or not."""
        return self._entries.get(stage, {}).get("done") is True

    def is_finished(self, stage: str) -> bool:
        """Return whether the stage is up to date: same key, finished, outputs still there."""
        entry = self._entries.get(stage, {})
        return (
            self.was_made(stage)
            and entry["key"] == self.keys[stage]
            and all(_exists(path) for paths in entry["outputs"].values() for path in paths)
        )

    def outputs(self, stage: str) -> Outputs:
        """Return what a finished stage made."""
        outputs = self._entries[stage]["outputs"]
        return {role: [Path(path) for path in paths] for role, paths in outputs.items()}

    def has_begun(self, stage: str, before: str) -> bool:
        """Return whether the stage began with the same results of the stage before it, finished or not."""
        return self._entries.get(stage, {}).get("before") == before

    def begin(self, stage: str, before: str = "") -> None:
        """Note that work on a stage starts."""
        self._entries[stage] = {"before": before, "key": self.keys[stage], "done": False, "outputs": {}}
        self._write()

    def finish(self, stage: str, outputs: Outputs) -> None:
        """Note that a stage is done."""
        files = {role: [str(path) for path in paths] for role, paths in outputs.items()}
        before = self._entries.get(stage, {}).get("before", "")
        self._entries[stage] = {"before": before, "key": self.keys[stage], "done": True, "outputs": files}
        self._write()

    def forget(self, stages: Iterable[str]) -> None:
        """Drop stages: they are out of date from now on."""
        for stage in stages:
            self._entries.pop(stage, None)
        self._write()

    def _write(self) -> None:
        write_atomic(self.path, json.dumps(self._entries, indent=1) + "\n")


def _is_entry(entry: Any) -> bool:
    """Return whether an entry of the record has the form that `StageRecord` writes."""
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
    except OSError:  # the name is too long
        return False
