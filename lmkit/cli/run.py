"""`lmkit run`: from text to a model that writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmkit.cli.console import Result, progress_on_stderr
from lmkit.cli.options import Commands
from lmkit.errors import UsageError

if TYPE_CHECKING:
    from lmkit.recipe.recipe import Recipe

app = Commands()


@app.add(
    "lmkit run quickstart --set run.name=first --set train.steps=300",
    "lmkit run quickstart --nproc 2",
    "lmkit run quickstart --seeds 3",
    "torchrun --nproc-per-node 2 -m lmkit run quickstart",
)
def run(
    recipe: str,
    set_: list[str] | None = None,
    skip_data: bool = False,
    from_stage: Annotated[str | None, typer.Option("--from", metavar="STAGE")] = None,
    force: bool = False,
    nproc: int = 1,
    seeds: Annotated[int | None, typer.Option(min=1, max=1000)] = None,
    strict: bool = False,
    print_recipe: bool = False,
    dry_run: bool = False,
) -> Any:
    """Turn text into a model that writes stories.

    The stages are corpus, tokenizer, encode, train, evaluate and generate. Stages that are up to date are skipped;
    an interrupted training resumes. Under torchrun, rank 0 makes the data, and all ranks train.

    Args:
        skip_data: Use the corpus, tokenizer and token files as they are.
        force: Start over, whichever recipe made the folder; the old training moves to old-<time> in it.
        from_stage: Redo this stage and all after it.
        strict: Stop before training if a held-out document, or more than 1% of the held-out text's runs of 13 words,
            stands in the training text.
        seeds: Make N runs with the seeds run.seed, run.seed + 1, ... in the folder of the run's name.
    """
    from lmkit.recipe.load import load_recipe, recipe_to_toml

    loaded = load_recipe(recipe, set_ or ())
    if print_recipe:
        return Result(recipe_to_toml(loaded), loaded.model_dump(mode="json"))
    from lmkit.cli import pipeline

    recipes = [loaded] if seeds is None else _with_seeds(loaded, seeds)
    options: Any = {"from_stage": from_stage, "skip_data": skip_data, "force": force, "nproc": nproc}
    options["strict"] = strict
    results: list[Result | None] = []
    if dry_run or seeds is not None:  # no run starts before another one is refused
        results = [pipeline.plan(it, **options) for it in recipes]
    if not dry_run:
        with progress_on_stderr() as progress:
            results = [pipeline.run(it, progress=progress, **options) for it in recipes]
    if seeds is None:
        return results[0]
    made = [result for result in results if result is not None]
    return Result("\n".join([result.text for result in made]), {"runs": [result.fields for result in made]})


def _with_seeds(recipe: Recipe, count: int) -> list[Recipe]:
    """Return recipes of runs with consecutive seeds, in the folder that would be the run's."""
    from lmkit.parallel.place import read_place
    from lmkit.recipe.run_folder import is_run

    folder, first = recipe.run.path, recipe.run.seed
    if read_place().world_size > 1:
        message = "--seeds: makes one run after the other, not under torchrun"
        raise UsageError("run.seeds_of_ranks", message, hint="lmkit run --seeds N --nproc N")
    if is_run(folder):
        hint = "name the folder of the runs: --set run.name=..."
        message = f"{folder}: is a run itself; --seeds makes runs in it"
        raise UsageError("run.seeds_in_a_run", message, hint=hint)
    runs = ({"folder": folder, "name": f"seed-{seed}", "seed": seed} for seed in range(first, first + count))
    return [recipe.changed(run=run) for run in runs]
