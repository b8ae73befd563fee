"""Which stages of a run are up to date.

A stage has a key: a hash of the parts of the recipe and the content of the files that it reads, and of the key of the
stage before it. A stage is up to date if it finished with the same key and its outputs are still there. Neither the
place of a file nor its times are in a key: a run folder may be moved, and a corpus copied.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lmkit.data.corpora import refuse_directory
from lmkit.errors import UsageError
from lmkit.recipe.run_folder import RECORD
from lmkit.recipe.schema import Recipe
from lmkit.storage import sha256_file, write_atomic

Outputs = dict[str, list[Path]]
"""What a stage made: role -> files."""
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
# Keys on which no result depends.
NO_EFFECT = ("tokenizer.workers", "data.workers", "corpus.folder", "run.folder", "run.name")
PIPE = "a pipe"  # stands for the hash of its content
_INSIDE = "./"  # begins a path in the record that is relative to the run folder


class StageRecord:
    """The stages of one run, on disk: key, outputs, and the content of the files that it read.

    Attributes:
        keys: stage -> its key now.
        content: key of the recipe -> hashes of the files that it names now.
    """

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self.folder = folder
        self._hashes: dict[str, list[Any]] = {}
        self.load()
        self.content = {
            dotted: [self._hash(path, dotted) for path in paths_of(recipe, dotted)] for dotted in FILES
        }
        self.keys = _stage_keys(recipe, self.content)

    def load(self) -> None:
        """Read the record."""
        try:
            content = json.loads((self.folder / RECORD).read_text("utf-8"))
        except (OSError, ValueError, RecursionError):
            content = None
        # It is written atomically: an entry that is not ours was damaged from outside, and its stage is out of date.
        entries = content if isinstance(content, dict) else {}
        self._entries = {stage: entry for stage, entry in entries.items() if _is_entry(entry)}
        if isinstance(known := entries.get("files"), dict):
            self._hashes = {
                path: facts for path, facts in known.items() if isinstance(facts, list)
            } | self._hashes

    def _hash(self, path: Path, key: str) -> str:
        """Return the hash of a file's content; the file is not read if it is as it was at the last time."""
        name, is_corpus = str(path.absolute()), key.startswith("corpus.")
        # A pipe can be read only once, by the stage; it may be gone when the run goes on.
        if is_corpus and (path.is_fifo() or (self._hashes.get(name) == [PIPE] and not path.is_file())):
            self._hashes[name] = [PIPE]
            return PIPE
        if is_corpus:
            refuse_directory(key, path)
        if not path.is_file():
            raise UsageError(
                "run.missing_file",
                f"{path}: no such file (key {key})",
                hint="paths in a recipe are relative to the current folder",
            )
        facts = path.stat()
        # A change that restores size and modification time still changes the time of the inode.
        state = [facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns]
        *known, digest = self._hashes.get(name, [None])
        if known != state or not isinstance(digest, str):
            digest = sha256_file(path)
            self._hashes[name] = [*state, digest]
        return digest

    def knows(self, dotted: str) -> bool:
        """Return whether some stage noted the content of the files that a key of the recipe names."""
        return any(dotted in entry.get("content", {}) for entry in self._entries.values())

    def changed_content(self, recipe: Recipe) -> Iterator[str]:
        """Yield `FILE (key KEY)` for the files whose content is not the one that the stages before training read."""
        for dotted, new in self.content.items():
            olds = [entry.get("content", {}).get(dotted) for entry in self._entries.values()]
            for old in [old for old in olds if old is not None and old != new][:1]:
                paths = [str(path) for path in paths_of(recipe, dotted)]
                if len(old) == len(new):
                    paths = [path for path, before, now in zip(paths, old, new, strict=True) if before != now]
                yield f"{', '.join(paths) or 'no file'} (key {dotted})"

    def was_made(self, stage: str) -> bool:
        """Return whether the stage finished at some time, up to date or not."""
        return self._entries.get(stage, {}).get("done") is True

    def is_finished(self, stage: str) -> bool:
        """Return whether the stage is up to date: same key, finished, outputs still there."""
        return (
            self.was_made(stage)
            and self._entries[stage]["key"] == self.keys[stage]
            and all(_exists(path) for paths in self.outputs(stage).values() for path in paths)
        )

    def outputs(self, stage: str) -> Outputs:
        """Return what a finished stage made."""
        outputs = self._entries[stage]["outputs"]
        return {role: [self._path(name) for name in names] for role, names in outputs.items()}

    def _path(self, name: str) -> Path:
        return self.folder / name if name.startswith(_INSIDE) else Path(name)

    def _name(self, path: Path) -> str:
        inside = path.is_relative_to(self.folder)
        return _INSIDE + path.relative_to(self.folder).as_posix() if inside else str(path)

    def begin(self, stage: str) -> None:
        """Note that work on a stage starts."""
        self._note(stage, done=False, outputs={})

    def finish(self, stage: str, outputs: Outputs) -> None:
        """Note that a stage is done."""
        names = {role: [self._name(path) for path in paths] for role, paths in outputs.items()}
        self._note(stage, done=True, outputs=names)

    def _note(self, stage: str, **facts: Any) -> None:
        read = {
            dotted: hashes for dotted, hashes in self.content.items() if dotted.split(".")[0] in READS[stage]
        }
        self._entries[stage] = {"key": self.keys[stage], **facts, "content": read}
        self._write()

    def forget(self, stages: Iterable[str]) -> None:
        """Drop stages: they are out of date from now on."""
        for stage in stages:
            self._entries.pop(stage, None)
        self._write()

    def _write(self) -> None:
        write_atomic(
            self.folder / RECORD, json.dumps(self._entries | {"files": self._hashes}, indent=1) + "\n"
        )


def paths_of(recipe: Recipe, dotted: str) -> list[Path]:
    """Return the files that a key of the recipe names."""
    table, key = dotted.split(".")
    value = getattr(getattr(recipe, table), key)
    return [value] if isinstance(value, Path) else list(value or ())


def _stage_keys(recipe: Recipe, content: dict[str, list[str]]) -> dict[str, str]:
    """Return a hash of everything that the result of each stage depends on."""
    tables = recipe.model_dump(mode="json")
    for table, key in (dotted.split(".") for dotted in NO_EFFECT):
        del tables[table][key]
    for dotted, hashes in content.items():
        table, key = dotted.split(".")
        tables[table][key] = hashes
    keys: dict[str, str] = {}
    key = ""
    for stage, names in READS.items():
        inputs = json.dumps([stage, key, *(tables[name] for name in names)], sort_keys=True)
        key = keys[stage] = hashlib.sha256(inputs.encode()).hexdigest()
    return keys


def _is_entry(entry: Any) -> bool:
    """Return whether an entry of the record has the form that `StageRecord` writes."""
    if not isinstance(entry, dict) or not isinstance(entry.get("key"), str):
        return False
    outputs = entry.get("outputs", {} if entry.get("done") is False else None)
    return all(
        isinstance(lists, dict)
        and all(
            isinstance(items, list) and all(isinstance(item, str) and "\0" not in item for item in items)
            for items in lists.values()
        )
        for lists in (outputs, entry.get("content", {}))
    )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # the name is too long
        return False
