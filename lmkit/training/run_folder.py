"""The run folder: who may write there, what it holds, and what is left of earlier sessions."""

from __future__ import annotations

import json
from pathlib import Path

from lmkit.errors import UsageError, reason
from lmkit.measure.environment import describe_environment
from lmkit.measure.plots import loss_curve
from lmkit.recipe.load import recipe_to_toml
from lmkit.recipe.schema import Recipe
from lmkit.storage import remove_partials, write_atomic
from lmkit.storage.atomic import PARTIAL_SUFFIX
from lmkit.training.checkpoint_folder import clean_leftovers
from lmkit.training.checkpoints import CHECKPOINTS
from lmkit.training.metrics import read_metrics

METRICS = "metrics.jsonl"
RECIPE = "recipe.toml"
ENVIRONMENT = "environment.json"
LOSS_PICTURE = "loss.png"
_CURVES = {"train": "training", "valid": "held out", "final": "all held-out data"}  # kind of record -> label


def check_writable(folder: Path) -> None:
    """Make the folder, and try a file in it, before any time is spent.

    Raises:
        UsageError: nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial = folder / f".writable{PARTIAL_SUFFIX}"  # a name that `tidy` removes, should a kill leave it
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise UsageError(
            f"{folder}: cannot write there: {reason(error)}",
            hint="choose another place with --set run.folder=...",
        ) from error


def tidy(folder: Path) -> list[Path]:
    """Remove what a killed session left behind; the caller holds the folder's lock."""
    checkpoints = folder / CHECKPOINTS
    removed = remove_partials(folder)
    if checkpoints.is_dir():
        removed += clean_leftovers(checkpoints)
    return removed


def describe_run(folder: Path, recipe: Recipe) -> None:
    """Write the resolved recipe and the environment: what is needed to make the run again."""
    write_atomic(folder / RECIPE, recipe_to_toml(recipe))
    write_atomic(folder / ENVIRONMENT, json.dumps(describe_environment(), indent=1) + "\n")


def draw_losses(folder: Path, *, title: str) -> None:
    """Write `loss.png` from the metrics, a marker at every evaluation; nothing if there are none yet."""
    records = read_metrics(folder / METRICS)
    series = {
        label: [(record["step"], record["loss"]) for record in records if record["kind"] == kind]
        for kind, label in _CURVES.items()
    }
    drawn = {label: points for label, points in series.items() if points}
    if drawn:
        picture = loss_curve(drawn, title=title, marked=(_CURVES["valid"], _CURVES["final"]))
        write_atomic(folder / LOSS_PICTURE, picture)
