"""Read `stages.json` of the first edition (0.1.0): one hash per stage, of everything that the stage depended on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmkit.errors import LmkitError
from lmkit.recipe.load import load_recipe, read_toml
from lmkit.recipe.run_folder import RECIPE
from lmkit.recipe.schema import Recipe

# Keys that could be None, which a recipe file leaves out.
_OPTIONAL = {
    "tokenizer": ("path",),
    "data": ("train", "valid"),
    "model": ("preset", "vocab_size", "num_kv_heads"),
    "train": ("max_minutes",),
}


@dataclass(frozen=True)
class Made:
    """How the stages of a run folder were made.

    Attributes:
        folder: where the run folder was; outputs in the record are below it.
        stages: for the other stages it is not known.
    """

    recipe: Recipe
    folder: Path
    stages: tuple[str, ...]


def read_record(folder: Path, entries: Mapping[str, Mapping[str, Any]]) -> Made | None:
    """Return how the stages of a run folder were made; None if it is not known.

    The recipe in the folder made a stage if its hash is the stage's: recipe and sources were not touched since.
    """
    try:
        content = read_toml(folder / RECIPE)
        keys = _keys(content)
        before = Path(content["run"]["folder"], content["run"]["name"])
        recipe = load_recipe(folder / RECIPE)
    except (LmkitError, OSError, KeyError, TypeError, ValueError):  # not as the first edition left them
        return None
    made = tuple(stage for stage, key in keys.items() if entries.get(stage, {}).get("key") == key)
    return Made(recipe, before, made)


def _keys(recipe: Mapping[str, Any]) -> dict[str, str]:
    """Return stage -> hash."""
    tables = {name: dict.fromkeys(_OPTIONAL.get(name, ())) | table for name, table in recipe.items()}
    for name in ("tokenizer", "data"):
        del tables[name]["workers"]
    sources = tables["corpus"]["train"] + tables["corpus"]["valid"]
    given = tables["tokenizer"]["path"]
    corpus = _key("corpus", tables["corpus"], _signature(sources))
    tokenizer = _key("tokenizer", corpus, tables["tokenizer"], _signature([given] if given else []))
    encode = _key("encode", tokenizer)
    names = ("run", "data", "model", "optimizer", "train", "parallel")
    train = _key("train", encode, *(tables[name] for name in names))
    return {
        "corpus": corpus,
        "tokenizer": tokenizer,
        "encode": encode,
        "train": train,
        "evaluate": _key("evaluate", train),
        "generate": _key("generate", train, tables["generate"]),
    }


def _key(stage: str, *inputs: Any) -> str:
    return hashlib.sha256(json.dumps([stage, *inputs], sort_keys=True).encode()).hexdigest()


def _signature(paths: list[str]) -> list[tuple[str, int, int]]:
    """Return name, size and modification time of files."""
    facts = [(path, Path(path).stat()) for path in paths]
    return [(path, status.st_size, status.st_mtime_ns) for path, status in facts]
