"""`lmkit train`."""

from __future__ import annotations

from typing import Annotated, Any

from lmkit.cli.console import Result
from lmkit.cli.options import (
    Commands,
    DryRunOption,
    NprocOption,
    PrintRecipeOption,
    RecipeArgument,
    SetOption,
    key_option,
    option,
)

app = Commands()


@app.add("lmkit train quickstart --nproc 2", "torchrun --nproc-per-node 2 -m lmkit train quickstart")
def train(
    recipe: RecipeArgument,
    set_: SetOption = None,
    steps: Annotated[int | None, key_option("train.steps")] = None,
    lr: Annotated[float | None, key_option("optimizer.lr")] = None,
    batch_size: Annotated[int | None, key_option("train.batch_size")] = None,
    device: Annotated[str | None, key_option("run.device")] = None,
    name: Annotated[str | None, key_option("run.name")] = None,
    resume: Annotated[str | None, key_option("checkpoint.resume")] = None,
    stop_at_step: Annotated[
        int | None, option("Stop after this step; the learning-rate schedule does not change.", min=1)
    ] = None,
    nproc: NprocOption = 1,
    print_recipe: PrintRecipeOption = False,
    dry_run: DryRunOption = False,
) -> Any:
    """Train a model, or resume from its newest checkpoint.

    Needs token files: those that `lmkit run` made in the run folder, or those that [data] of the recipe names.
    """
    from lmkit.recipe.load import load_recipe, recipe_to_toml

    flags = {
        "train.steps": steps,
        "optimizer.lr": lr,
        "train.batch_size": batch_size,
        "run.device": device,
        "run.name": name,
        "checkpoint.resume": resume,
    }
    loaded = load_recipe(recipe, set_ or (), flags=flags)
    if print_recipe:
        return Result(recipe_to_toml(loaded), loaded.model_dump(mode="json"))
    from lmkit.generation import write_samples
    from lmkit.training import session

    if dry_run:
        return session.plan(loaded, stop_at_step=stop_at_step, nproc=nproc)
    return session.train(loaded, stop_at_step=stop_at_step, nproc=nproc, write_samples=write_samples)
