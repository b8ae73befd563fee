"""What a run folder is: the names of its files, the record that makes it lmkit's, and its recipe's place.

A folder is a run because a record that lmkit wrote says so, not because of what files in it are called. It may have
been moved or copied since.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lmkit import __version__
from lmkit.errors import UsageError
from lmkit.storage.inputs import read_object

RECIPE = "recipe.toml"
ENVIRONMENT = "environment.json"
RECORD = "stages.json"
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
BESIDE_TOKENIZER = (CHAT_TEMPLATE, TOKENIZER_CONFIG, GENERATION_CONFIG)
"""Files that say more about the tokenizer; a run has those that it needs."""
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
STORIES = "stories.txt"
WANDB = "wandb.json"
DATA_FILES = tuple(
    f"{folder}/{part}.{kind}"
    for folder, kinds in (
        ("corpus", ("txt", "jsonl")),
        ("tokens", ("npy", "json", "documents", "mask", "overlap")),
    )
    for part in ("train", "valid")
    for kind in kinds
)
"""Files that the stages before the training write, besides the tokenizer."""
TRAINED_FILES = (RECIPE, ENVIRONMENT, METRICS, "loss.png", WANDB, RECORD)
"""Files that `lmkit train` writes, besides checkpoints."""
RUN_FILES = (
    *(*DATA_FILES, TOKENIZER, *BESIDE_TOKENIZER, "training.json", "evaluation.json", STORIES),
    *TRAINED_FILES,
)
"""Files that `lmkit run` writes, besides checkpoints; the record is last."""
_MARK = "lmkit"
"""Key of the record and of `environment.json` that only lmkit writes: its version."""
_RESULTS = (
    *(RECIPE, ENVIRONMENT, "*results.*", "*summary.json", "*report.md", "*.png"),
    *("profile.*", "kineto_trace.*", "memory_*"),  # recordings
)
_PATHS = {
    "corpus": ("train", "valid"),
    "tokenizer": ("path",),
    "data": ("train", "valid", "sources"),
    "checkpoint": ("resume",),
}
"""Keys that may name files inside the run folder."""


def token_file(folder: Path, part: str) -> Path:
    """Return the token file of a run for "train" or "valid"."""
    return folder / "tokens" / f"{part}.npy"


def tokenizer_in(path: Path) -> Path:
    """Return the `tokenizer.json` in a folder; a path that is no folder as it is."""
    return path / TOKENIZER if path.is_dir() else path


def read_record(folder: Path) -> dict[str, Any]:
    """Return the record `stages.json` of a run folder; {} if there is none, or it is not lmkit's."""
    record = object_in(folder / RECORD)
    return record if isinstance(record.get(_MARK), dict) else {}


def is_entry(entry: Any) -> bool:
    """Return whether an entry of the record has the form that `lmkit.cli.pipeline.StageRecord` writes."""

    def has_lists(value: Any) -> bool:
        lists = list(value.values()) if isinstance(value, dict) else [None]
        return all(isinstance(it, list) and all(isinstance(item, str) for item in it) for it in lists)

    if not isinstance(entry, dict) or not all(isinstance(entry.get(k, {}), dict) for k in ("values", "made")):
        return False
    outputs = entry.get("outputs", {} if entry.get("done") is False else None)
    return has_lists(outputs) and has_lists(entry.get("content", {}))


def save_record(folder: Path, entries: Mapping[str, Any]) -> None:
    """Write the record `stages.json`, which makes the folder a run of lmkit."""
    from lmkit.storage.atomic import write_atomic  # not to load a recipe

    write_atomic(folder / RECORD, json.dumps({**entries, _MARK: {"version": __version__}}, indent=1) + "\n")


def is_run(folder: Path) -> bool:
    """Return whether lmkit made a run in this folder: the content of a record says so, or a checkpoint, which is all
    that `lmkit import` writes."""
    return bool(read_record(folder)) or any(
        {"format", "checksum"} <= manifest.keys() and "state.json" in (manifest.get("files") or ())
        for manifest in map(object_in, folder.glob(f"{CHECKPOINTS}/step-*/manifest.json"))
    )


def refuse_foreign_files(folder: Path, names: Iterable[str] = TRAINED_FILES) -> None:
    """Refuse a folder that is no run and has files under names that lmkit would write."""
    for name in names:
        if os.path.lexists(folder / name):
            if is_run(folder):
                return
            message = f"{folder}: this run would replace {name!r}, and no run of lmkit made it"
            hint = "move it away, or choose another folder: --set run.name=..."
            raise UsageError("run.not_a_run_folder", message, hint=hint)


def refuse_results(folder: Path, *, force: bool) -> None:
    """Refuse a folder that holds files like those of a bench, a profile or a run; with `force`, only the recipe and
    the environment of a run or of somebody else."""
    environment = object_in(folder / ENVIRONMENT)  # lmkit's own: that of a run, a bench or a profile
    is_ours = isinstance(environment.get(_MARK), str) and "packages" in environment and not is_run(folder)
    patterns = _RESULTS if not force else () if is_ours else (RECIPE, ENVIRONMENT)
    for found in (path for pattern in patterns for path in folder.glob(pattern)):
        what, hint = "holds results", "choose another folder, or add --force"
        if not is_ours and found.name in (RECIPE, ENVIRONMENT):
            what, hint = "no bench or profile wrote", "choose another folder with --output"
        raise UsageError("output.exists", f"{folder}: {what}: {found.name}", hint=hint)


def object_in(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if the file is missing or damaged."""
    try:
        return read_object(path)
    except (OSError, ValueError):
        return {}


def run_folder_of(recipe: Path) -> Path | None:
    """Return the run folder to which a recipe file belongs; None if it belongs to none."""
    folder = recipe.parent
    if recipe.name != RECIPE or not is_run(folder):
        return None
    if folder.name in ("", ".."):  # the recipe was named from inside the folder
        place = folder.resolve()
        folder = Path(os.path.relpath(place.parent)) / place.name
    return folder


def placed_in(folder: Path, tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of a resolved recipe for the run folder in which it lies.

    Paths inside the folder as it was then become paths inside the folder as it is now; other paths stay.
    """
    placed = dict(tables)
    run = tables.get("run")
    if not isinstance(run, dict) or {type(run.get("folder")), type(run.get("name"))} != {str}:
        return placed  # no recipe that lmkit wrote
    before = Path(run["folder"], run["name"])
    with suppress(OSError):  # there is no such folder any more
        if before.samefile(folder):
            return placed
    placed["run"] = {**run, "folder": str(folder.parent), "name": folder.name}

    def moved(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [moved(item) for item in value]
        if isinstance(value, dict):
            return {key: moved(item) for key, item in value.items()}
        if not isinstance(value, str) or not Path(value).is_relative_to(before):
            return value
        place = folder / Path(value).relative_to(before)
        # A file of the user's stays where it is when `--force` sets the run aside.
        return str(place if os.path.lexists(place) or not os.path.lexists(value) else value)

    for name, keys in _PATHS.items():
        if isinstance(table := tables.get(name), dict):
            placed[name] = table | {key: moved(table[key]) for key in table.keys() & keys}
    return placed
