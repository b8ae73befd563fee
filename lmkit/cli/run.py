"""`lmkit run`: from text to a model that writes."""

from typing import Annotated

import typer

from lmkit.cli.options import (
    DebugOption,
    DryRunOption,
    JsonOption,
    PluginOption,
    PrintRecipeOption,
    RecipeArgument,
    SetOption,
)
from lmkit.cli.progress import progress_on_stderr
from lmkit.cli.render import show


def register(app: typer.Typer) -> None:
    """Add the command to the root."""
    app.command(epilog="Example: lmkit run quickstart --set run.name=first --set train.steps=300")(run)


def run(
    recipe: RecipeArgument,
    set_: SetOption = None,
    plugin: PluginOption = None,
    skip_data: Annotated[
        bool,
        typer.Option(
            "--skip-data",
            help="Take the corpus, tokenizer and token files as they are.",
        ),
    ] = False,
    from_stage: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="STAGE",
            help="Do this stage and all after it again.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Delete what the run folder holds, whichever recipe made it, and start over."
        ),
    ] = False,
    print_recipe: PrintRecipeOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """From text to a model that writes, in one command.

    The stages are corpus, tokenizer, encode (token files), train, evaluate and generate (a story). Those that are up
    to date are not done again; a training that was interrupted goes on.
    """
    from lmkit.recipe.load import load_recipe, recipe_to_toml

    loaded = load_recipe(recipe, set_ or ())
    if print_recipe:
        typer.echo(recipe_to_toml(loaded), nl=False)
        return
    from lmkit.commands import run as command

    if dry_run:
        show(command.plan(loaded, from_stage=from_stage, skip_data=skip_data, force=force), as_json=as_json)
        return
    with progress_on_stderr() as progress:
        result = command.run(
            loaded, from_stage=from_stage, skip_data=skip_data, force=force, progress=progress
        )
    show(result, as_json=as_json)
