"""Compare trainings, of one seed or several: which recipe is better at equal steps, tokens and minutes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from lmkit.errors import UsageError
from lmkit.measure.statistics import mean_difference
from lmkit.measure.tables import Column, terminal_table
from lmkit.recipe.load import differences, load_recipe
from lmkit.recipe.run_folder import METRICS, RECIPE
from lmkit.training.metrics import Record, read_metrics

METRICS_SHOWN = {"bits_per_byte": "bits per byte", "loss": "loss"}
AXES = ("steps", "tokens", "minutes")


@dataclass(frozen=True)
class Curve:
    """The held-out losses of one run, over its evaluations.

    Attributes:
        places: "steps", "tokens", "minutes" -> where they were evaluated, ascending.
        values: on the first `train.eval_batches` batches of the held-out data.
        final: on all held-out data, after the last step; None: the run has not ended.
    """

    places: dict[str, Sequence[float]]
    values: Sequence[float]
    final: float | None

    def at(self, axis: str, place: float) -> float:
        """Interpolate linearly."""
        return float(np.interp(place, self.places[axis], self.values))


@dataclass(frozen=True)
class Difference:
    """The means of two groups of runs at one place; lower is better.

    Attributes:
        at: "steps", "tokens", "minutes": equal for both; "the end": of each run, on all held-out data.
        place: how many.
        difference: after - before.
        low, high: 95% interval of the difference over seeds; None: a single run on both sides.
        verdict: "better", "worse", "no difference", or "one seed".
    """

    at: str
    place: float | None
    before: float
    after: float
    difference: float
    low: float | None
    high: float | None
    verdict: str


@dataclass(frozen=True)
class RunsCompared:
    """How the runs of one recipe compare with those of another.

    Attributes:
        metric: "bits_per_byte" where all runs have it, else "loss".
        runs: how many, before and after.
        changes: lines of what differs between the recipes, besides names and seeds.
    """

    metric: str
    runs: tuple[int, int]
    rows: tuple[Difference, ...]
    changes: tuple[str, ...]

    def __str__(self) -> str:
        columns = (
            Column("at", "at equal"),
            Column("place", "", ",.6g"),
            Column("before", "before", ".4f"),
            Column("after", "after", ".4f"),
            Column("difference", "difference", "+.4f"),
            Column("low", "95% from", "+.4f"),
            Column("high", "to", "+.4f"),
            Column("verdict", "after is"),
        )
        lines = [
            f"{METRICS_SHOWN[self.metric]} on held-out text; runs: {self.runs[0]} before, {self.runs[1]} after"
        ]
        if all(row.at not in AXES for row in self.rows):
            lines += [
                "nothing at equal steps, tokens or minutes: that takes a train.eval_interval below train.steps"
            ]
        lines += self.changes or ("the recipes are equal",)
        return terminal_table([asdict(row) for row in self.rows], columns) + "\n".join(lines)


def run_folders(path: Path) -> list[Path]:
    """Return the run folder itself, or those in a folder of runs (`lmkit run --seeds`); [] if it is neither."""
    if (path / METRICS).is_file():
        return [path]
    return sorted(file.parent for file in path.glob(f"*/{METRICS}"))


def compare_training(before: Path, after: Path) -> RunsCompared:
    """Compare the held-out losses of two runs, or of two folders of runs that differ in their seeds only.

    Places are the largest that all runs have reached. The interval takes the runs as drawn from two normal
    distributions of equal width.

    Raises:
        UsageError: a folder holds no runs, or no run was evaluated.
    """
    folders = [run_folders(path) for path in (before, after)]
    for path, found in zip((before, after), folders, strict=True):
        if not found:
            wrong = f"holds no {METRICS}" if path.is_dir() else "there is no such folder"
            raise UsageError("compare.no_run", f"{path}: {wrong}", hint="name a run, or a folder of runs")
    records = [[read_metrics(folder / METRICS) for folder in found] for found in folders]
    evaluated = [r for group in records for run in group for r in run if r["kind"] in ("valid", "final")]
    has_bits = all(isinstance(record.get("bits_per_byte"), float) for record in evaluated)
    metric = "bits_per_byte" if has_bits else "loss"
    ours, theirs = ([_curve(run, metric) for run in group] for group in records)
    rows = []
    for axis in AXES:
        ends = [curve.places[axis][-1] for curve in (*ours, *theirs) if curve.values]
        begins = [curve.places[axis][0] for curve in (*ours, *theirs) if curve.values]
        if len(ends) == len(ours) + len(theirs) and min(ends) >= max(begins):
            place = min(ends)
            rows.append(
                _row(axis, place, [c.at(axis, place) for c in ours], [c.at(axis, place) for c in theirs])
            )
    finals = [[curve.final for curve in group if curve.final is not None] for group in (ours, theirs)]
    if [len(some) for some in finals] == [len(ours), len(theirs)]:
        rows.append(_row("the end", None, *finals))
    if not rows:
        hint = "train them further, with train.eval_interval below train.steps"
        raise UsageError("compare.not_evaluated", f"{before}, {after}: no evaluations to compare", hint=hint)
    # Validated: a key that is newer than a recipe counts with its default.
    recipes = [load_recipe(path if (path := found[0] / RECIPE).is_file() else None) for found in folders]
    changes = differences(*recipes, ignore=("run.name", "run.folder", "run.seed"))
    return RunsCompared(metric, (len(ours), len(theirs)), tuple(rows), tuple(changes))


def _row(at: str, place: float | None, before: Sequence[float], after: Sequence[float]) -> Difference:
    difference, reach = mean_difference(before, after)
    if reach is None:
        low = high = None
        verdict = "one seed"
    else:
        low, high = difference - reach, difference + reach
        verdict = "better" if high < 0 else "worse" if low > 0 else "no difference"
    return Difference(at, place, fmean(before), fmean(after), difference, low, high, verdict)


def _curve(records: Sequence[Record], metric: str) -> Curve:
    def points(kind: str, *keys: str) -> list[tuple[Any, ...]]:
        rows = (tuple(record.get(key) for key in keys) for record in records if record["kind"] == kind)
        return [row for row in rows if all(isinstance(value, int | float) for value in row)]

    trained = [(0, 0, 0.0), *points("train", "step", "tokens", "seconds")]
    steps = [step for step, *_ in trained]
    held_out = sorted(point for point in points("valid", "step", metric) if point[0] <= steps[-1])
    finals = points("final", metric)
    at = [step for step, _ in held_out]
    tokens = np.interp(at, steps, [tokens for _, tokens, _ in trained])
    minutes = np.interp(at, steps, [seconds / 60 for *_, seconds in trained])
    places = {"steps": at, "tokens": tokens.tolist(), "minutes": minutes.tolist()}
    return Curve(places, [value for _, value in held_out], finals[-1][0] if finals else None)
