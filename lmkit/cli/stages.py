"""Which stages of a run are up to date.

Each stage has a key: a hash of the recipe tables that it reads and of the key of the stage before it. A stage is up
to date if it finished with the same key and its outputs are still there. The run folder keeps the record.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmkit.errors import UsageError
from lmkit.recipe.schema import Recipe
from lmkit.storage import write_atomic

Outputs = dict[str, list[Path]]
"""What a stage made: role -> files."""
RECORD = "stages.json"


class StageRecord:
    """The stages of one run.

    The record holds for each stage its key, the key of the stage before it when it began ("before"), whether it is
    done, and its outputs. Every change is on disk before the call returns.
    """

    def __init__(self, folder: Path, keys: Mapping[str, str]) -> None:
        self.path = folder / RECORD
        self.keys = keys
        self._entries = self._read()

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            content = json.loads(self.path.read_text("utf-8"))
        except (OSError, ValueError, RecursionError):
            content = None
        # It is written atomically: an entry that is not ours was damaged from outside, and its stage is out of date.
        entries = content.items() if isinstance(content, dict) else ()
        return {stage: entry for stage, entry in entries if _is_entry(entry)}

    def _note(self, stage: str, **entry: Any) -> None:
        self._entries[stage] = {"before": "", **self._entries.get(stage, {}), **entry}
        self._write()

    def _write(self) -> None:
        write_atomic(self.path, json.dumps(self._entries, indent=1) + "\n")

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

    def finish(self, stage: str, outputs: Outputs) -> None:
        """Note that a stage is done."""
        files = {role: [str(path) for path in paths] for role, paths in outputs.items()}
        self._note(stage, key=self.keys[stage], done=True, outputs=files)

    def outputs(self, stage: str) -> Outputs:
        """Return what a finished stage made."""
        outputs = self._entries[stage]["outputs"]
        return {role: [Path(path) for path in paths] for role, paths in outputs.items()}

    def has_begun(self, stage: str, before: str) -> bool:
        """Return whether the stage began with the same results of the stage before it, finished or not."""
        return self._entries.get(stage, {}).get("before") == before

    def begin(self, stage: str, before: str = "") -> None:
        """Note that work on a stage starts."""
        self._note(stage, key=self.keys[stage], before=before, done=False, outputs={})

    def forget(self, stages: Iterable[str]) -> None:
        """Drop stages: they are out of date from now on."""
        for stage in stages:
            self._entries.pop(stage, None)
        self._write()


def stage_keys(recipe: Recipe) -> dict[str, str]:
    """Return a hash of everything that the result of each stage depends on.

    Raises:
        UsageError: a file that the recipe names is missing.
    """
    corpus_table, tokenizer_table = recipe.corpus, recipe.tokenizer
    assert corpus_table is not None
    assert tokenizer_table is not None
    tables = recipe.model_dump(mode="json")
    for table, key in (("tokenizer", "workers"), ("data", "workers")):
        tables[table].pop(key)  # the result does not depend on it
    given = tokenizer_table.path
    texts = _signature(corpus_table.train, "corpus.train") + _signature(corpus_table.valid, "corpus.valid")
    corpus = _hash("corpus", tables["corpus"], texts)
    tokenizer = _hash(
        "tokenizer",
        corpus,
        tables["tokenizer"],
        _signature([given] if given else [], "tokenizer.path"),
    )
    encode = _hash("encode", tokenizer)
    read_by_training = ("run", "data", "model", "optimizer", "train", "parallel")
    train = _hash("train", encode, *(tables[name] for name in read_by_training))
    return {
        "corpus": corpus,
        "tokenizer": tokenizer,
        "encode": encode,
        "train": train,
        "evaluate": _hash("evaluate", train),
        "generate": _hash("generate", train, tables["generate"]),
    }


def _hash(*inputs: Any) -> str:
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def _signature(paths: Sequence[Path], key: str) -> list[tuple[str, int, int]]:
    """Return name, size and modification time of files: they change with the content, and reading it is not needed.

    Raises:
        UsageError: a file is missing.
    """
    signature = []
    for path in paths:
        if not path.is_file():
            raise UsageError(
                "run.missing_file",
                f"{path}: no such file (key {key})",
                hint="paths in a recipe are relative to the current folder",
            )
        facts = path.stat()
        signature.append((str(path), facts.st_size, facts.st_mtime_ns))
    return signature


def _is_entry(entry: Any) -> bool:
    """Return whether an entry of the record has the form that `Pipeline` writes."""
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
