"""`lmkit train` and `lmkit evaluate`."""

from pathlib import Path
from typing import Annotated

import typer

from lmkit.cli.options import (
    DebugOption,
    DeviceOption,
    DryRunOption,
    JsonOption,
    NprocOption,
    PluginOption,
    PrintRecipeOption,
    RecipeArgument,
    SetOption,
    examples,
    given,
)
from lmkit.cli.render import show


def register(app: typer.Typer) -> None:
    """Add the commands to the root."""
    app.command(
        epilog=examples(
            "lmkit train quickstart --nproc 2", "torchrun --nproc-per-node 2 -m lmkit train quickstart"
        )
    )(train)
    app.command(epilog="Example: lmkit evaluate artifacts/runs/quickstart")(evaluate)


def train(
    recipe: RecipeArgument,
    set_: SetOption = None,
    plugin: PluginOption = None,
    steps: Annotated[
        int | None, typer.Option(help="Total optimizer steps (train.steps).", show_default=False)
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="auto, cpu or cuda (run.device).", show_default=False)
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the run and its folder (run.name).", show_default=False)
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(help="auto, never, or a checkpoint folder (checkpoint.resume).", show_default=False),
    ] = None,
    stop_at_step: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Stop after this step; the learning-rate schedule does not change.",
            show_default=False,
        ),
    ] = None,
    nproc: NprocOption = 1,
    print_recipe: PrintRecipeOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Train a model, or resume from its newest checkpoint.

    Needs token files: those that `lmkit run` made in the run folder, or those that [data] of the recipe names.
    """
    from lmkit.recipe.load import load_recipe, recipe_to_toml

    flags = given(train__steps=steps, run__device=device, run__name=name, checkpoint__resume=resume)
    loaded = load_recipe(recipe, set_ or (), flags=flags)
    if print_recipe:
        typer.echo(recipe_to_toml(loaded), nl=False)
        return
    from lmkit.training import session as command

    if dry_run:
        show(command.plan(loaded, stop_at_step=stop_at_step, nproc=nproc), as_json=as_json)
        return
    result = command.train(loaded, stop_at_step=stop_at_step, nproc=nproc)
    if result is not None:  # ranks other than 0 say nothing
        show(result, as_json=as_json)


def evaluate(
    run: Annotated[Path, typer.Argument(help="A run folder or a checkpoint folder.")],
    tokens: Annotated[
        Path | None,
        typer.Option(
            help="Token file to evaluate on; default: the held-out file of the run.", show_default=False
        ),
    ] = None,
    device: DeviceOption = "auto",
    plugin: PluginOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Print loss, perplexity and bits per byte on held-out data."""
    from lmkit.training import evaluation as command

    show(command.evaluate_run(run, tokens=tokens, device=device), as_json=as_json)
