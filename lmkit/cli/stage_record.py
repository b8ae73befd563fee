"""Which stages of a run are up to date.

The record of a finished stage holds the values of the recipe and the content of the files on which its result
depends, and the content of its outputs. A stage is up to date if all three are still the same. Neither the place of a
file nor its times count: a run folder may be moved, and a corpus copied. A key that is newer than the record counts
with its default: a newer lmkit does not redo the stages of an older one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lmkit.data.corpora import mark_of, refuse_directory
from lmkit.errors import UsageError
from lmkit.recipe.load import shipped_recipes
from lmkit.recipe.run_folder import (
    ADDED_TOKENS,
    BESIDE_TOKENIZER,
    RECORD,
    SPECIAL_TOKENS_MAP,
    is_entry,
    save_record,
)
from lmkit.recipe.schema import Recipe
from lmkit.recipe.vocabulary import END_OF_TEXT
from lmkit.storage.atomic import noted_digest
from lmkit.storage.inputs import read_object
from lmkit.tokenizer.vocabulary import end_of_text_of

Outputs = dict[str, list[Path]]
"""What a stage made: role -> files."""
# Tables that a stage reads besides the results of the stages before it, in the order of the stages.
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
NO_EFFECT = (
    *("tokenizer.workers", "data.workers", "corpus.folder", "run.folder", "run.name"),
    *("train.tensorboard", "train.sample_interval"),
)
_INSIDE = "./"  # begins a path in the record that is relative to the run folder


class StageRecord:
    """The stages of one run, on disk.

    Args:
        reads_sources: hash the files that the recipe names; otherwise they count as unchanged and may be gone.

    Attributes:
        content: key of the recipe -> hashes of the files that it names now.
        mark: what ends a document in text files; None: nothing does.
        damage: what is wrong with the record; None if nothing is.
    """

    def __init__(self, folder: Path, recipe: Recipe, *, reads_sources: bool = True) -> None:
        self.folder = folder
        self._recipe = recipe
        self._hashes: dict[str, list[Any]] = {}
        self._entries: dict[str, dict[str, Any]] = {}
        self._values, self._defaults = _values(recipe)
        self.mark = self._values["corpus.separator"]
        self.load()
        if reads_sources:
            self.content = self._contents(recipe)
        else:
            noted = [entry.get("content", {}) for entry in self._entries.values()]
            self.content = {dotted: next((c[dotted] for c in noted if dotted in c), []) for dotted in FILES}

    def load(self) -> None:
        """Read the record. It is written atomically: an entry that is not ours was damaged from outside."""
        path = self.folder / RECORD
        content: Any = {}
        try:
            content = read_object(path)
        except FileNotFoundError:
            pass
        except (OSError, ValueError):
            content = None
        entries = content or {}
        if isinstance(known := entries.get("files"), dict):
            self._hashes = {
                path: facts for path, facts in known.items() if isinstance(facts, list)
            } | self._hashes
        self._entries = {stage: entry for stage, entry in entries.items() if is_entry(entry)}
        lost = [stage for stage in READS if stage in entries and stage not in self._entries]
        if content != entries:
            lost = ["every stage"]
        self.damage = f"{path}: damaged, so that {', '.join(lost)} may run again" if lost else None

    def _contents(self, recipe: Recipe) -> dict[str, list[str]]:
        """Return the hashes of the files that a recipe names: key of the recipe -> hashes."""
        return {dotted: [self._hash(path, dotted) for path in paths_of(recipe, dotted)] for dotted in FILES}

    def _hash(self, path: Path, key: str) -> str:
        """Return the hash of the content of a file that the recipe names under `key`."""
        is_corpus = key.startswith("corpus.")
        if is_corpus:
            refuse_directory(key, path)
        if not path.is_file():
            yours = '["FILE"]' if is_corpus else "FILE"
            hint = f"name yours: --set '{key}={yours}'; paths are relative to the current folder"
            if path.parent.name in shipped_recipes():  # a run that has not been made
                hint = f"make it: lmkit run {path.parent.name}; or {hint}"
            wrong = "not a regular file" if path.exists() else "no such file"
            raise UsageError("run.missing_file", f"{path}: {wrong} (key {key})", hint=hint)
        return self._digest(path)

    def _digest(self, path: Path) -> str:
        """Return the hash of a file's content; the file is not read if it is as it was at the last time."""
        name = str(path.absolute())
        self._hashes[name] = noted = noted_digest(path, self._hashes.get(name, ()))
        return noted[-1]

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
        """Return whether the stage is up to date: finished, of the same values and content, its outputs whole."""
        return self._is_current(stage) and not self.damaged(stage)

    def _is_current(self, stage: str) -> bool:
        now = _read_by(stage, self._values, self.content)
        entry = self._entries.get(stage, {})
        values = self._defaults | entry.get("values", {})
        return (
            self.was_made(stage)
            and "values" in entry
            and all(values[dotted] == value for dotted, value in now["values"].items())
            and entry.get("content") == now["content"]
        )

    def damaged(self, stage: str) -> list[Path]:
        """Return the outputs that are missing or not as the stage left them; [] if the stage is out of date."""
        if not self._is_current(stage):
            return []
        made = self._entries[stage].get("made", {})
        outputs = [path for paths in self.outputs(stage).values() for path in paths]
        return [path for path in outputs if not self._is_whole(path, made.get(self._name(path)))]

    def _is_whole(self, path: Path, digest: str | None) -> bool:
        if digest is None or not path.exists():
            return path.exists()
        return path.is_file() and self._digest(path) == digest

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
        # A corpus that is used where it lies is not the run's.
        sources = {path for dotted in FILES for path in paths_of(self._recipe, dotted)}
        made = {
            self._name(path): self._digest(path)
            for paths in outputs.values()
            for path in paths
            if path.is_relative_to(self.folder) and path not in sources and path.is_file()
        }
        self._note(stage, done=True, outputs=names, made=made)

    def _note(self, stage: str, **facts: Any) -> None:
        self._entries[stage] = _read_by(stage, self._values, self.content) | facts
        self.save()

    def forget(self, stages: Iterable[str]) -> None:
        """Drop stages: they are out of date from now on."""
        for stage in stages:
            self._entries.pop(stage, None)
        self.save()

    def save(self) -> None:
        """Write the record, with the hashes of files that were read."""
        save_record(self.folder, self._entries | {"files": self._hashes})


def _mark_of(recipe: Recipe) -> str | None:
    """Return what ends a document in text files."""
    corpus, table = recipe.corpus, recipe.tokenizer
    if corpus is not None:
        if end := mark_of((*corpus.train, *corpus.valid), corpus.separator, None):
            return end
        if corpus.source not in ("synth", "files", "chat"):
            return END_OF_TEXT
    path = None if table is None else table.path
    if path is not None and not path.is_file():  # refused elsewhere; or the run has its own
        return END_OF_TEXT
    return end_of_text_of(recipe)


def paths_of(recipe: Recipe, dotted: str) -> list[Path]:
    """Return the files that a key of the recipe names; with a tokenizer those beside it that say more."""
    table, key = dotted.split(".")
    value = getattr(getattr(recipe, table), key)
    if isinstance(value, Path):
        beside = [value.parent / name for name in (*BESIDE_TOKENIZER, SPECIAL_TOKENS_MAP, ADDED_TOKENS)]
        return [value, *(path for path in beside if path.is_file())]
    return list(value or ())


def _values(recipe: Recipe) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values, and their defaults, on which results depend: dotted key -> JSON value."""
    values: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    for name in (name for names in READS.values() for name in names):
        table = getattr(recipe, name)
        for into, source in ((values, table), (defaults, type(table)())):
            into |= {f"{name}.{key}": value for key, value in source.model_dump(mode="json").items()}
    for dotted in (*NO_EFFECT, *FILES):
        values.pop(dotted, None)
    values["corpus.separator"], defaults["corpus.separator"] = _mark_of(recipe), END_OF_TEXT
    return values, defaults


def _read_by(stage: str, values: dict[str, Any], content: dict[str, list[str]]) -> dict[str, Any]:
    """Return what a stage and those before it read."""
    names = list(READS)
    tables = {table for before in names[: names.index(stage) + 1] for table in READS[before]}
    return {
        "values": {dotted: value for dotted, value in values.items() if dotted.split(".")[0] in tables},
        "content": {dotted: hashes for dotted, hashes in content.items() if dotted.split(".")[0] in tables},
    }
