"""`lmkit recipe`: look at recipes and check them."""

from pathlib import Path
from typing import Annotated

import typer

from lmkit.cli.options import DebugOption, ForceOption, JsonOption, PluginOption, RecipeArgument, SetOption
from lmkit.cli.render import show

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="List, show, check and copy recipes.",
    epilog="Example: lmkit recipe show quickstart",
)  # fmt: skip


@app.command("list", epilog="Example: lmkit recipe list")
def list_(as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """The recipes that come with lmkit."""
    from lmkit.commands import recipe as command

    show(command.list_recipes(), as_json=as_json)


@app.command("show", epilog="Example: lmkit recipe show quickstart --set train.steps=100")
def show_(
    recipe: RecipeArgument,
    set_: SetOption = None,
    plugin: PluginOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Print a recipe with every key and what it means.

    Also the real size of its model.
    """
    from lmkit.commands import recipe as command
    from lmkit.recipe.load import load_recipe

    show(command.show_recipe(load_recipe(recipe, set_ or ())), as_json=as_json)


@app.command(epilog="Example: lmkit recipe validate my.toml")
def validate(
    recipe: RecipeArgument,
    set_: SetOption = None,
    plugin: PluginOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Check a recipe and report every mistake at once."""
    from lmkit.commands import recipe as command

    show(command.validate_recipe(recipe, set_ or ()), as_json=as_json)


@app.command(epilog="Example: lmkit recipe copy quickstart my.toml")
def copy(
    recipe: RecipeArgument,
    output: Annotated[Path, typer.Argument(help="The new file.")],
    force: ForceOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Copy a shipped recipe, comments included, to a file of your own."""
    from lmkit.commands import recipe as command

    show(command.copy_recipe(recipe, output, force=force), as_json=as_json)
