"""`lmkit run`: from text to a model that writes."""

from typing import Annotated

import typer

from lmkit.cli.options import (
    DebugOption,
    DryRunOption,
    JsonOption,
    NprocOption,
    PluginOption,
    PrintRecipeOption,
    RecipeArgument,
    SetOption,
    examples,
)
from lmkit.cli.progress import progress_on_stderr
from lmkit.cli.render import show


def register(app: typer.Typer) -> None:
    """Add the command to the root."""
    app.command(
        epilog=examples(
            "lmkit run quickstart --set run.name=first --set train.steps=300",
            "lmkit run quickstart --nproc 2",
            "torchrun --nproc-per-node 2 -m lmkit run quickstart",
        )
    )(run)


def run(
    recipe: RecipeArgument,
    set_: SetOption = None,
    plugin: PluginOption = None,
    skip_data: Annotated[
        bool, typer.Option("--skip-data", help="Use the corpus, tokenizer and token files as they are.")
    ] = False,
    from_stage: Annotated[
        str | None,
        typer.Option("--from", metavar="STAGE", help="Redo this stage and all after it.", show_default=False),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Delete the content of the run folder, whichever recipe made it, and start over."
        ),
    ] = False,
    nproc: NprocOption = 1,
    print_recipe: PrintRecipeOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Turn text into a model that writes stories.

    The stages are corpus, tokenizer, encode, train, evaluate and generate. Stages that are up to date are skipped;
    an interrupted training resumes. Under torchrun, rank 0 makes the data, and all ranks train.
    """
    from lmkit.recipe.load import load_recipe, recipe_to_toml

    loaded = load_recipe(recipe, set_ or ())
    if print_recipe:
        typer.echo(recipe_to_toml(loaded), nl=False)
        return
    from lmkit.cli import pipeline

    if dry_run:
        plan = pipeline.plan(loaded, from_stage=from_stage, skip_data=skip_data, force=force)
        show(plan, as_json=as_json)
        return
    with progress_on_stderr() as progress:
        result = pipeline.run(
            loaded, from_stage=from_stage, skip_data=skip_data, force=force, nproc=nproc, progress=progress
        )
    if result is not None:  # rank 0 prints
        show(result, as_json=as_json)
