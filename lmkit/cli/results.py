"""`lmkit compare`, `lmkit report`, `lmkit rerun`: compare results, write reports, make a result again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmkit.cli.console import Result, progress_on_stderr
from lmkit.cli.options import MOST_RANKS, Commands
from lmkit.errors import UsageError
from lmkit.recipe.run_folder import CHECKPOINTS, ENVIRONMENT, METRICS, RECIPE, is_run, object_in, placed_in

if TYPE_CHECKING:
    from lmkit.recipe.recipe import Recipe
    from lmkit.training.checkpoint import TrainingState

app = Commands()


@app.add("lmkit compare before/ after/", "lmkit compare artifacts/runs/quickstart artifacts/runs/wider")
def compare(
    before: Path,
    after: Path,
    threshold: Annotated[float | None, typer.Option(min=0)] = None,
    plugin: list[Path] | None = None,
) -> Any:
    """Compare two results of one bench, row by row, or two trainings.

    For trainings: which recipe has the lower held-out loss at equal steps, tokens and minutes, with 95% intervals
    over seeds (`lmkit run --seeds 3` makes such runs).

    "No difference above D" says that the whole interval is inside +-D, the threshold; otherwise the verdict is
    "unclear" and says between what the difference lies.

    Verdicts on benches allow for the machine's noise and for its drift, which rows of other people's code (sdpa,
    torch) show. On a busy machine most verdicts are unclear. Exit code 1 if a bench's row is worse or wrong, or
    nothing was compared.

    Args:
        before: A bench's results, folder or .jsonl file; a run, or a folder of runs.
        after: The newer one, likewise.
        threshold: Smallest relative difference that counts.  [default: 0.03 of a time, 0.005 of a held-out loss]
    """
    if any((path / METRICS).exists() or any(path.glob(f"*/{METRICS}")) for path in (before, after)):
        from lmkit.training import results

        smallest = results.SMALLEST_DIFFERENCE if threshold is None else threshold
        return results.compare_training(before, after, threshold=smallest)
    from lmkit.bench.compare import SMALLEST_DIFFERENCE, compare_files

    return compare_files(before, after, threshold=SMALLEST_DIFFERENCE if threshold is None else threshold)


@app.add(
    "lmkit report",
    "lmkit report artifacts/profiles --output write_ups",
    "lmkit report artifacts/runs/quickstart --html",
)
def report(
    folder: Annotated[Path | None, typer.Argument(show_default=False)] = None,
    output: Path | None = None,
    html: bool = False,
    beside: list[Path] | None = None,
    force: bool = False,
) -> Any:
    """Write reports on measured results, or a page about a run.

    Attention, data parallelism, optimizer sharding and profiling have a document each, if there are results. With
    --html: one page about a run, with its curves, texts, recipe and environment.

    Args:
        output: Folder of the documents, or the file of the page.  [default: `reports` in that folder, or in
            artifacts/benches; `report.html` in the run folder]
        html: Write one page about a run, which a browser opens.
        beside: With --html: another run on the same page.
        folder: Where the results of benches and profiles lie, at any depth; with --html a run folder.  [default:
            artifacts/benches and artifacts/profiles]
    """
    if (beside and not html) or (html and folder is None):
        message = "--html takes a run folder; --beside belongs to --html"
        hint = "for example: lmkit report artifacts/runs/quickstart --html --beside artifacts/runs/other"
        raise UsageError("report.options_exclude", message, hint=hint)
    if html:
        from lmkit.training.results import write_page

        assert folder is not None
        return write_page(folder, beside or (), output=output, force=force)
    from lmkit.bench.report import write_reports
    from lmkit.profile.summary import SUMMARIES

    return write_reports(folder, output, force=force, profiles=SUMMARIES)


OF_THE_MOMENT = ("time_utc", "gpu_state", "limits")
"""Tables and keys of environment.json that differ every time."""
NAMES = ("run.folder", "run.name", "checkpoint.resume")
"""Keys of the recipe that a rerun sets."""


@app.add("lmkit rerun artifacts/runs/quickstart", "lmkit rerun artifacts/h200/attention --output again")
def rerun(
    folder: Path,
    output: Path | None = None,
    nproc: Annotated[int | None, typer.Option(min=1, max=MOST_RANKS)] = None,
    plugin: list[Path] | None = None,
) -> Any:
    """Make a run or a bench again from its stored recipe, and list what drifted.

    Compares versions, the machine, losses step by step, and times as `lmkit compare` does; of a run also the recipe,
    with that of its newest checkpoint. Exit code 1 if a variant of the bench is wrong or failed.

    Args:
        folder: A run folder, or the folder of a bench's results.
        output: The new folder; default: FOLDER-rerun.
        nproc: Ranks to start; default: as many as the first time.
    """
    from lmkit.recipe.load import load_recipe, validate
    from lmkit.recipe.recipe import differences

    recipe_file = folder / RECIPE
    if not recipe_file.is_file():
        hint = "name a folder that lmkit run, lmkit train or lmkit bench wrote"
        raise UsageError("rerun.no_recipe", f"{folder}: holds no {RECIPE}", hint=hint)
    place = folder if folder.name not in ("", "..") else folder.resolve()
    new = output or place.parent / f"{place.name}-rerun"
    if new.exists():
        raise UsageError("output.exists", f"{new}: exists", hint="name another folder: --output FOLDER")
    recipe, before = load_recipe(recipe_file, benches=not is_run(folder)), object_in(folder / ENVIRONMENT)
    made_again = _train_again if is_run(folder) else _measure_again
    made = made_again(folder, recipe, new, nproc)
    changes = differences(before, object_in(new / ENVIRONMENT), ignore=OF_THE_MOMENT)
    trained = []
    for path in (folder, new):
        if (state := _newest_state(path)) is not None:
            kept = placed_in(path, state.recipe)
            trained.append(validate(kept, origin=str(path / CHECKPOINTS), resolved=True))
    if len(trained) == 2:
        changes += differences(*trained, ignore=NAMES)
    lines = [f"{folder} -> {new}", *(f"drift  {line}" for line in changes)]
    lines += [] if changes else ["versions, machine and recipe are the same"]
    fields = {"folder": new, "drift": changes, **made.fields}
    return Result("\n".join([*lines, made.text]), fields, made.is_fine)


def _measure_again(folder: Path, recipe: Recipe, new: Path, nproc: int | None) -> Result:
    from lmkit.bench.compare import SMALLEST_DIFFERENCE, compare_files
    from lmkit.bench.harness import run_bench
    from lmkit.registry import BENCHES

    files = {f"{BENCHES.facts(name).prefix(name)}results.jsonl": name for name in BENCHES.names}
    found = [file for file in files if (folder / file).is_file()]
    if len(found) != 1:
        message = f"{folder}: holds {METRICS} of no run, nor one bench's rows"
        raise UsageError("rerun.no_results", message, hint="name the folder of one bench's results")
    ranks = nproc or object_in(folder / ENVIRONMENT).get("world_size", 1)
    with progress_on_stderr() as progress:
        made = run_bench(files[found[0]], recipe, new, nproc=ranks, progress=progress)
    compared = compare_files(folder / found[0], new / found[0], threshold=SMALLEST_DIFFERENCE)
    fields = {"bench": files[found[0]], "rows": compared.rows, "worse": compared.worse}
    return Result(str(compared), fields, is_fine=made is None or made.is_fine)


def _train_again(folder: Path, recipe: Recipe, new: Path, nproc: int | None) -> Result:
    from lmkit.bench.compare import compare_rows
    from lmkit.training.metrics import read_metrics

    again = recipe.changed(run={"folder": new.parent, "name": new.name}, checkpoint={"resume": "auto"})
    state = _newest_state(folder)
    ranks = nproc or (1 if state is None else state.world_size)
    if recipe.corpus is not None and recipe.tokenizer is not None and recipe.data.is_made:
        from lmkit.cli import pipeline

        with progress_on_stderr() as progress:
            pipeline.run(again, nproc=ranks, progress=progress)
    else:
        from lmkit.generation import write_samples
        from lmkit.training.session import train

        train(again, nproc=ranks, write_samples=write_samples)
    before, after = (read_metrics(path / METRICS) for path in (folder, new))
    losses = [_losses(kind, before, after) for kind in ("train", "valid", "final")]
    losses = [(facts, said) for facts, said in losses if facts["steps"]]
    times = compare_rows([_time_row(before)], [_time_row(after)])
    lines = [*(said for _, said in losses), f"milliseconds a token, between records of training\n{times}"]
    fields = {"losses": [facts for facts, _ in losses], "rows": times.rows, "worse": times.worse}
    return Result("\n".join(lines), fields)


def _newest_state(folder: Path) -> TrainingState | None:
    """Return what the newest checkpoint says of its training; None without one."""
    from lmkit.training.checkpoint import open_checkpoint, saved_steps

    saved = saved_steps(folder / CHECKPOINTS)
    return open_checkpoint(saved[-1].path).state if saved else None


Records = Sequence[Mapping[str, Any]]


def _losses(kind: str, before: Records, after: Records) -> tuple[dict[str, Any], str]:
    """Return how the losses of one kind differ in two runs: facts, and a line about them."""
    old, new = ({r["step"]: r["loss"] for r in records if r["kind"] == kind} for records in (before, after))
    both = old.keys() & new.keys()  # the files have null for what is not finite
    gaps = {step: abs(new[step] - old[step]) for step in both if None not in (old[step], new[step])}
    differing = sorted(step for step, gap in gaps.items() if gap)
    first, largest = min(differing, default=None), max(gaps.values(), default=0.0)
    not_finite = sum((old[step] is None) != (new[step] is None) for step in both)
    said = f"equal at all {len(both):,} steps"
    if not_finite:
        said = f"not finite at {not_finite:,} of {len(both):,} steps of one of the runs"
    elif differing:
        said = f"differ at {len(differing):,} of {len(both):,} steps, first at {first:,}, by {largest:.3g} at most"
    facts = {"steps": len(both), "differing": len(differing), "first": first, "largest": largest}
    return {"kind": kind, **facts, "not_finite": not_finite}, f"{kind} losses  {said}"


def _time_row(records: Records) -> dict[str, Any]:
    """Return a row as benches have it. The first record is left out: its steps warm up."""
    speeds = [record.get("tokens_per_second") for record in records if record["kind"] == "train"][1:]
    samples = [1e3 / speed for speed in speeds if isinstance(speed, float) and speed > 0]
    return {"what": "training", "samples_ms": samples}
