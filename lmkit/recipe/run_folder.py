"""Name the files of a run folder, and tell its recipe where the folder is now: it may have been moved or copied."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RECIPE = "recipe.toml"
ENVIRONMENT = "environment.json"
RECORD = "stages.json"
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
BESIDE_TOKENIZER = (CHAT_TEMPLATE, TOKENIZER_CONFIG, GENERATION_CONFIG)
"""Files that say more about the tokenizer; a run has those that it needs."""
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
STORIES = "stories.txt"
_PATHS = (
    ("corpus", "train"),
    ("corpus", "valid"),
    ("tokenizer", "path"),
    ("data", "train"),
    ("data", "valid"),
    ("checkpoint", "resume"),
)
"""Keys that may name files inside the run folder."""


def token_file(folder: Path, part: str) -> Path:
    """Return the token file of a run for "train" or "valid"."""
    return folder / "tokens" / f"{part}.npy"


def run_folder_of(recipe: Path) -> Path | None:
    """Return the run folder to which a recipe file belongs; None if it belongs to none."""
    folder = recipe.parent
    if recipe.name != RECIPE or not (
        (folder / RECORD).exists()
        or any(folder.glob(f"{CHECKPOINTS}/step-*"))
        # The copy beside old checkpoints is for `lmkit generate`.
        or ((folder / METRICS).exists() and not any(folder.glob("step-*")))
    ):
        return None
    if folder.name in ("", ".."):  # the recipe was named from inside the folder
        place = folder.resolve()
        folder = Path(os.path.relpath(place.parent)) / place.name
    return folder


def placed_in(folder: Path, tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of a resolved recipe for the run folder in which it lies.

    Paths inside the folder as it was then become paths inside the folder as it is now; other paths stay.
    """
    placed = {name: dict(table) if isinstance(table, dict) else table for name, table in tables.items()}
    run = placed.get("run")
    if not isinstance(run, dict) or not all(isinstance(run.get(key), str) for key in ("folder", "name")):
        return placed  # no recipe that lmkit wrote
    before = Path(run["folder"], run["name"])
    if _is_same(before, folder):
        return placed
    run.update(folder=str(folder.parent), name=folder.name)

    def moved(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [moved(item) for item in value]
        inside = isinstance(value, str) and Path(value).is_relative_to(before)
        return str(folder / Path(value).relative_to(before)) if inside else value

    for table, key in _PATHS:
        if isinstance(placed.get(table), dict) and key in placed[table]:
            placed[table][key] = moved(placed[table][key])
    return placed


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:  # there is no such folder any more
        return False
