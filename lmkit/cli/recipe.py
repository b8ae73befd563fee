"""`lmkit recipe`: list, show, check and copy recipes."""

from __future__ import annotations

from pathlib import Path

from lmkit.cli.console import Result
from lmkit.cli.options import Commands
from lmkit.measure.tables import enumeration

app = Commands("List, show, check and copy recipes.", example="lmkit recipe show quickstart")


@app.add("lmkit recipe list", name="list")
def list_() -> Result:
    """List the recipes that come with lmkit."""
    from lmkit.recipe.load import shipped_recipes

    purposes = {}
    for name, path in shipped_recipes().items():
        comments = (line for line in path.read_text("utf-8").splitlines() if line.startswith("#"))
        purposes[name] = next(comments, "").lstrip("# ")
    width = max(map(len, purposes), default=0)
    text = "\n".join(f"{name:<{width}}  {purpose}" for name, purpose in purposes.items())
    return Result(text, {"recipes": purposes})


@app.add("lmkit recipe show quickstart --set train.steps=100")
def show(recipe: str, set_: list[str] | None = None) -> Result:
    """Print a recipe with the meaning of every key.

    `lmkit plan RECIPE` counts the parameters of its model.
    """
    from lmkit.recipe.load import load_recipe
    from lmkit.recipe.reference import annotated_toml

    loaded = load_recipe(recipe, set_ or (), benches=True)
    text = annotated_toml(loaded)
    return Result(text, {"tables": loaded.model_dump(mode="json"), "text": text})


@app.add("lmkit recipe validate my.toml")
def validate(recipe: str, set_: list[str] | None = None) -> Result:
    """Check a recipe and report every mistake at once."""
    from lmkit.recipe.load import load_recipe

    loaded = load_recipe(recipe, set_ or (), benches=True)
    tables = [name for name in type(loaded).model_fields if name in loaded.model_fields_set]
    text = enumeration(f"{recipe}: valid, tables", tables or ["none"])
    return Result(text, {"recipe": recipe, "tables": tables})


@app.add("lmkit recipe copy quickstart my.toml")
def copy(recipe: str, output: Path, force: bool = False) -> Result:
    """Copy a shipped recipe with its comments to a new file.

    Args:
        output: The new file.
    """
    from lmkit.recipe.load import find_recipe
    from lmkit.storage.atomic import write_atomic
    from lmkit.storage.inputs import read_input
    from lmkit.storage.outputs import refuse_existing

    path = find_recipe(recipe)
    refuse_existing(output, force=force)
    write_atomic(output, read_input(path))
    return Result(f"wrote {output}", {"output": output})
