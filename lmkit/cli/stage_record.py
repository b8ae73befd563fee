"""Which stages of a run are up to date.

The record of a finished stage holds the values of the recipe and the content of the files on which its result
depends, and the content of its outputs. A stage is up to date if all three are still the same. Neither the place of a
file nor its times count: a run folder may be moved, and a corpus copied. A key that is newer than the record counts
with its default: a newer lmkit does not redo the stages of an older one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lmkit.data.corpora import mark_of, refuse_directory
from lmkit.errors import UsageError
from lmkit.recipe import END_OF_TEXT, run_folder
from lmkit.recipe.load import shipped_recipes
from lmkit.recipe.schema import Recipe
from lmkit.storage.atomic import noted_digest
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
        entries: stage -> its entry in the record.
        content: key of the recipe -> hashes of the files that it names now.
        mark: ends a document in text files; None: nothing does.
        damage: says that the record is damaged; None if it is not.
    """

    def __init__(self, folder: Path, recipe: Recipe, *, reads_sources: bool = True) -> None:
        self.folder, self.mark = folder, _mark_of(recipe)
        record = run_folder.read_record(folder)
        self.entries = {stage: record[stage] for stage in READS if run_folder.is_entry(record.get(stage))}
        lost = ", ".join(stage for stage in READS if stage in record and stage not in self.entries)
        if not record and (folder / run_folder.RECORD).exists():
            lost = "every stage"
        self.damage = f"{folder / run_folder.RECORD}: damaged, so that {lost} may run again" if lost else None
        noted = record.get("files")
        self._noted: dict[str, Any] = noted if isinstance(noted, dict) else {}
        self._sources: dict[str, list[Path]] = {}
        self.content: dict[str, list[str]] = {}
        for key in FILES:
            self._sources[key] = paths = paths_of(recipe, key)
            if reads_sources:
                self.content[key] = [self._digest(_checked(path, key)) for path in paths]
            else:
                contents = (entry.get("content", {}) for entry in self.entries.values())
                self.content[key] = next((content[key] for content in contents if key in content), [])
        # A stage reads its tables and those of the stages before it.
        self._reads: dict[str, dict[str, Any]] = {}
        self._defaults: dict[str, Any] = {}
        values: dict[str, Any] = {}
        for stage, tables in READS.items():
            for name in tables:
                table = getattr(recipe, name)
                for into, source in ((values, table), (self._defaults, type(table)())):
                    into |= {f"{name}.{key}": value for key, value in source.model_dump(mode="json").items()}
            values["corpus.separator"], self._defaults["corpus.separator"] = self.mark, END_OF_TEXT
            counted = {key: value for key, value in values.items() if key not in (*NO_EFFECT, *FILES)}
            content = {key: self.content[key] for key in FILES if key in values}
            self._reads[stage] = {"values": counted, "content": content}

    def _digest(self, path: Path) -> str:
        """Return the hash of a file's content; the file is not read if it is as it was at the last time."""
        name = str(path.absolute())
        self._noted[name] = noted = noted_digest(path, self._noted.get(name))
        return noted[-1]

    def changed_content(self) -> Iterator[str]:
        """Yield `FILE (key KEY)` for the files whose content is not the one that the stages before training read."""
        for key, new in self.content.items():
            olds = [entry.get("content", {}).get(key, new) for entry in self.entries.values()]
            for old in [old for old in olds if old != new][:1]:
                triples = zip_longest(self._sources[key], old, new)
                paths = [str(path) for path, before, now in triples if path and before != now]
                yield f"{', '.join(paths) or 'no file'} (key {key})"

    def was_made(self, stage: str) -> bool:
        """Return whether the stage finished at some time, up to date or not."""
        return self.entries.get(stage, {}).get("done") is True

    def damaged(self, stage: str) -> list[Path] | None:
        """Return the outputs that are missing or not as the stage left them; None if the stage is out of date."""
        now, entry = self._reads[stage], self.entries.get(stage, {})
        if not self.was_made(stage) or "values" not in entry or entry.get("content") != now["content"]:
            return None
        values = self._defaults | entry["values"]
        if any(values[key] != value for key, value in now["values"].items()):
            return None
        made, damaged = entry.get("made", {}), []
        for path in (path for paths in self.outputs(stage).values() for path in paths):
            digest = made.get(self._name(path))
            is_whole = path.exists() if digest is None else path.is_file() and self._digest(path) == digest
            damaged += [] if is_whole else [path]
        return damaged

    def outputs(self, stage: str) -> Outputs:
        """Return what a finished stage made."""
        outputs: Outputs = {}
        for role, names in self.entries[stage]["outputs"].items():
            outputs[role] = [self.folder / name if name.startswith(_INSIDE) else Path(name) for name in names]
        return outputs

    def _name(self, path: Path) -> str:
        inside = path.is_relative_to(self.folder)
        return _INSIDE + path.relative_to(self.folder).as_posix() if inside else str(path)

    def begin(self, stage: str) -> None:
        """Note that work on a stage starts."""
        self.entries[stage] = self._reads[stage] | {"done": False, "outputs": {}}
        self.save()

    def finish(self, stage: str, outputs: Outputs) -> None:
        """Note that a stage is done."""
        sources = {path for paths in self._sources.values() for path in paths}
        made: dict[str, str] = {}
        for path in (path for paths in outputs.values() for path in paths):
            # A corpus that is used where it lies is not the run's.
            if path.is_relative_to(self.folder) and path not in sources and path.is_file():
                made[self._name(path)] = self._digest(path)
        names = {role: list(map(self._name, paths)) for role, paths in outputs.items()}
        self.entries[stage] = self._reads[stage] | {"done": True, "outputs": names, "made": made}
        self.save()

    def forget(self, stages: Iterable[str]) -> None:
        """Drop stages: they are out of date from now on."""
        for stage in stages:
            self.entries.pop(stage, None)

    def save(self) -> None:
        """Write the record, with the hashes of files that were read."""
        run_folder.save_record(self.folder, self.entries | {"files": self._noted})


def _checked(path: Path, key: str) -> Path:
    """Return the path of a file that the recipe names under `key`; refuse what is no file."""
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
    return path


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


def paths_of(recipe: Recipe, key: str) -> list[Path]:
    """Return the files that a key of the recipe names; with a tokenizer those beside it that say more."""
    table, _, name = key.partition(".")
    value = getattr(getattr(recipe, table), name)
    if isinstance(value, Path):
        beside = [
            value.parent / name
            for name in (*run_folder.BESIDE_TOKENIZER, run_folder.SPECIAL_TOKENS_MAP, run_folder.ADDED_TOKENS)
        ]
        return [value, *(path for path in beside if path.is_file())]
    return list(value or ())
