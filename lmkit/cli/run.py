"""`lmkit run`: from text to a model that writes."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from lmkit.cli.console import Result, progress_on_stderr
from lmkit.cli.options import (
    Commands,
    DryRunOption,
    NprocOption,
    PrintRecipeOption,
    RecipeArgument,
    SetOption,
    option,
)

app = Commands()


@app.add(
    "lmkit run quickstart --set run.name=first --set train.steps=300",
    "lmkit run quickstart --nproc 2",
    "torchrun --nproc-per-node 2 -m lmkit run quickstart",
)
def run(
    recipe: RecipeArgument,
    set_: SetOption = None,
    skip_data: Annotated[
        bool, typer.Option("--skip-data", help="Use the corpus, tokenizer and token files as they are.")
    ] = False,
    from_stage: Annotated[
        str | None, option("Redo this stage and all after it.", "--from", metavar="STAGE")
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Start over, whichever recipe made the run folder; checkpoints are kept as checkpoints.old-<time>.",
        ),
    ] = False,
    nproc: NprocOption = 1,
    print_recipe: PrintRecipeOption = False,
    dry_run: DryRunOption = False,
) -> Any:
    """Turn text into a model that writes stories.

    The stages are corpus, tokenizer, encode, train, evaluate and generate. Stages that are up to date are skipped;
    an interrupted training resumes. Under torchrun, rank 0 makes the data, and all ranks train.
    """
    from lmkit.recipe.load import load_recipe, recipe_to_toml

    loaded = load_recipe(recipe, set_ or ())
    if print_recipe:
        return Result(recipe_to_toml(loaded), loaded.model_dump(mode="json"))
    from lmkit.cli import pipeline

    if dry_run:
        return pipeline.plan(loaded, from_stage=from_stage, skip_data=skip_data, force=force)
    with progress_on_stderr() as progress:
        return pipeline.run(
            loaded, from_stage=from_stage, skip_data=skip_data, force=force, nproc=nproc, progress=progress
        )
