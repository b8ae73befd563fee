"""`lmkit recipe list|show|validate|copy`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmkit.measure.tables import enumeration, statement
from lmkit.recipe.load import find_recipe, load_recipe, shipped_recipes
from lmkit.recipe.reference import annotated_toml
from lmkit.recipe.schema import Recipe
from lmkit.storage import write_atomic
from lmkit.storage.outputs import refuse_existing


@dataclass(frozen=True)
class RecipeList:
    recipes: dict[str, str]

    def __str__(self) -> str:
        width = max(map(len, self.recipes), default=0)
        return "\n".join(f"{name:<{width}}  {purpose}" for name, purpose in self.recipes.items())


def list_recipes() -> RecipeList:
    """Name and purpose of each shipped recipe."""
    return RecipeList({name: _headline(path) for name, path in shipped_recipes().items()})


def _headline(path: Path) -> str:
    """Return the first comment line of a recipe."""
    lines = path.read_text("utf-8").splitlines()
    return next((line.lstrip("# ").strip() for line in lines if line.startswith("#")), "")


@dataclass(frozen=True)
class RecipeShown:
    """A resolved recipe.

    Attributes:
        parameters: of its model, and how many of them multiply each token; None where it does not say the vocabulary.
        text: TOML, with what every key means.
    """

    tables: dict[str, Any]
    parameters: int | None
    multiplying: int | None
    text: str

    def __str__(self) -> str:
        if self.parameters is None:
            return self.text
        return f"# parameters: {self.parameters:,} ({self.multiplying:,} multiply each token)\n{self.text}"


def show_recipe(recipe: Recipe) -> RecipeShown:
    """The resolved recipe with every key explained, and the model's size."""
    tables, text = recipe.model_dump(mode="json"), annotated_toml(recipe)
    model = recipe.model
    vocab_size = recipe.tokenizer.vocab_size if recipe.tokenizer else None
    if model is None or (model.vocab_size or vocab_size) is None:
        return RecipeShown(tables, None, None, text)
    from lmkit.model.accounting import count_parameters

    counts = count_parameters(model.model_copy(update={"vocab_size": model.vocab_size or vocab_size}))
    return RecipeShown(tables, counts.total, counts.multiplying, text)


@dataclass(frozen=True)
class RecipeIsValid:
    recipe: str
    tables: tuple[str, ...]

    def __str__(self) -> str:
        return enumeration(f"{self.recipe}: valid, tables", self.tables or ["none"])


def validate_recipe(source: str, overrides: Sequence[str]) -> RecipeIsValid:
    """Load a recipe; raises UsageError with every mistake."""
    recipe = load_recipe(source, overrides)
    present = tuple(name for name in type(recipe).model_fields if name in recipe.model_fields_set)
    return RecipeIsValid(source, present)


@dataclass(frozen=True)
class RecipeCopied:
    output: str
    command: str
    """The command line that uses it."""

    def __str__(self) -> str:
        return f"wrote {self.output}\n{statement('use it with', self.command)}"


def copy_recipe(source: str, output: Path, *, force: bool) -> RecipeCopied:
    """Copy a recipe file as it stands, comments included."""
    path = find_recipe(source)
    refuse_existing(output, force=force)
    words = _command(load_recipe(path), shlex.quote(str(output)))
    write_atomic(output, path.read_bytes())
    return RecipeCopied(str(output), f"lmkit {words}")


def _command(recipe: Recipe, file: str) -> str:
    if recipe.corpus is not None:
        return f"run {file}"
    benches = [name for name in type(recipe.bench).model_fields if getattr(recipe.bench, name) is not None]
    if benches:
        ranks = " --nproc 2" if benches[0] in ("ddp", "all_reduce", "optimizer") else ""
        return f"bench {benches[0].replace('_', '-')} {file}{ranks}"
    return f"profile kineto {file}" if recipe.data.train is None else f"train {file}"
