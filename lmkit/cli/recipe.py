"""`lmkit recipe`: list, show, check and copy recipes."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from lmkit.cli.options import (
    DebugOption,
    ForceOption,
    Group,
    JsonOption,
    PluginOption,
    RecipeArgument,
    SetOption,
)
from lmkit.cli.render import show
from lmkit.measure.tables import enumeration, statement

app = typer.Typer(
    cls=Group, no_args_is_help=True, rich_markup_mode=None, help="List, show, check and copy recipes.",
    epilog="Example: lmkit recipe show quickstart",
)  # fmt: skip


@dataclass(frozen=True)
class RecipeList:
    """Result of `lmkit recipe list`: name -> purpose."""

    recipes: dict[str, str]

    def __str__(self) -> str:
        width = max(map(len, self.recipes), default=0)
        return "\n".join(f"{name:<{width}}  {purpose}" for name, purpose in self.recipes.items())


@app.command("list", epilog="Example: lmkit recipe list")
def list_(as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """List the recipes that come with lmkit."""
    from lmkit.recipe.load import shipped_recipes

    purposes = {}
    for name, path in shipped_recipes().items():
        comments = (line for line in path.read_text("utf-8").splitlines() if line.startswith("#"))
        purposes[name] = next(comments, "").lstrip("# ")
    show(RecipeList(purposes), as_json=as_json)


@dataclass(frozen=True)
class RecipeShown:
    """Result of `lmkit recipe show`.

    Attributes:
        parameters, multiplying: of the model, and those that multiply each token; None if the recipe does not give
            the vocabulary.
        text: TOML, with the meaning of every key.
    """

    tables: dict[str, Any]
    parameters: int | None
    multiplying: int | None
    text: str

    def __str__(self) -> str:
        if self.parameters is None:
            return self.text
        return f"# parameters: {self.parameters:,} ({self.multiplying:,} multiply each token)\n{self.text}"


@app.command("show", epilog="Example: lmkit recipe show quickstart --set train.steps=100")
def show_(
    recipe: RecipeArgument,
    set_: SetOption = None,
    plugin: PluginOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Print a recipe with the meaning of every key.

    Also prints the number of parameters of the model.
    """
    from lmkit.recipe.load import load_recipe

    show(describe(load_recipe(recipe, set_ or ())), as_json=as_json)


def describe(recipe: Any) -> RecipeShown:
    """Return the resolved recipe with every key explained, and the size of its model."""
    from lmkit.recipe.reference import annotated_toml

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
    """Result of `lmkit recipe validate`: the tables that the recipe gives."""

    recipe: str
    tables: tuple[str, ...]

    def __str__(self) -> str:
        return enumeration(f"{self.recipe}: valid, tables", self.tables or ["none"])


@app.command(epilog="Example: lmkit recipe validate my.toml")
def validate(
    recipe: RecipeArgument,
    set_: SetOption = None,
    plugin: PluginOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Check a recipe and report every mistake at once."""
    from lmkit.recipe.load import load_recipe

    loaded = load_recipe(recipe, set_ or ())
    given = tuple(name for name in type(loaded).model_fields if name in loaded.model_fields_set)
    show(RecipeIsValid(recipe, given), as_json=as_json)


@dataclass(frozen=True)
class RecipeCopied:
    """Result of `lmkit recipe copy`: the file, and the command line that uses it."""

    output: str
    command: str

    def __str__(self) -> str:
        return f"wrote {self.output}\n{statement('use it with', self.command)}"


@app.command(epilog="Example: lmkit recipe copy quickstart my.toml")
def copy(
    recipe: RecipeArgument,
    output: Annotated[Path, typer.Argument(help="The new file.")],
    force: ForceOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Copy a shipped recipe with its comments to a new file."""
    from lmkit.recipe.load import find_recipe, load_recipe
    from lmkit.storage import write_atomic
    from lmkit.storage.outputs import refuse_existing

    path = find_recipe(recipe)
    refuse_existing(output, force=force)
    command = f"lmkit {_command(load_recipe(path), shlex.quote(str(output)))}"
    write_atomic(output, path.read_bytes())
    show(RecipeCopied(str(output), command), as_json=as_json)


def _command(recipe: Any, file: str) -> str:
    """Return the command that a recipe is for."""
    from lmkit.registry import BENCHES

    if recipe.corpus is not None:
        return f"run {file}"
    for bench in BENCHES.names:
        if getattr(recipe.bench, bench) is not None:
            needs_ranks = BENCHES.facts(bench).ranks == "required"
            return f"bench {bench.replace('_', '-')} {file}{' --nproc 2' if needs_ranks else ''}"
    return f"profile kineto {file}" if recipe.data.train is None else f"train {file}"
