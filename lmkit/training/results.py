"""What trainings found: which recipe is better at equal steps, tokens and minutes (`lmkit compare`), and one HTML
page about runs (`lmkit report RUN --html`)."""

from __future__ import annotations

import base64
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from lmkit.data.shards import read_meta, shard_paths
from lmkit.data.token_files import SIDECAR, TokenMeta
from lmkit.errors import LmkitError, UsageError
from lmkit.measure.plots import decorate, loss_curve
from lmkit.measure.statistics import mean_difference
from lmkit.measure.tables import Column, terminal_table
from lmkit.recipe.load import load_recipe, read_toml
from lmkit.recipe.recipe import Recipe, differences
from lmkit.recipe.run_folder import ENVIRONMENT, METRICS, RECIPE, STORIES
from lmkit.storage.atomic import write_atomic
from lmkit.storage.inputs import read_input
from lmkit.storage.outputs import refuse_existing, refuse_replacing
from lmkit.training.metrics import Record, read_metrics
from lmkit.training.run_data import token_paths

METRICS_SHOWN = {"bits_per_byte": "bits per byte", "loss": "loss"}
AXES = ("steps", "tokens", "minutes")
SAME_RECIPE = ("run.name", "run.folder", "run.seed")
"""The keys in which runs of one recipe differ."""
SMALLEST_DIFFERENCE = 0.005
"""The share of a loss that counts as a difference: 0.015 nats of 3."""


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
        threshold: the smallest difference that counts.
        verdict: "better", "worse": the interval excludes 0; "no difference": it lies inside +- threshold; else
            "unclear"; "one seed": there is no interval; "another text": they were not evaluated on the same text.
    """

    at: str
    place: float | None
    before: float
    after: float
    difference: float
    low: float | None
    high: float | None
    threshold: float
    verdict: str


@dataclass(frozen=True)
class RunsCompared:
    """How the runs of one recipe compare with those of another."""

    metric: str
    runs: tuple[int, int]
    rows: tuple[Difference, ...]
    changes: tuple[str, ...]

    def __str__(self) -> str:
        specs = {"place": ",.6g", "before": ".4f", "after": ".4f"}
        specs |= dict.fromkeys(("difference", "low", "high"), "+.4f")
        heads = {"at": "at equal", "place": "", "low": "95% from", "high": "to", "verdict": "after is"}
        keys = ("at", *specs, "verdict")
        columns = [Column(key, heads.get(key, key), specs.get(key, "")) for key in keys]
        before, after = self.runs
        lines = [f"{METRICS_SHOWN[self.metric]} on held-out text; runs: {before} before, {after} after"]
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


def compare_training(before: Path, after: Path, *, threshold: float = SMALLEST_DIFFERENCE) -> RunsCompared:
    """Compare the held-out losses of two runs, or of two folders of runs that differ in their seeds only.

    Places are the largest that all runs have reached. The interval takes the runs as drawn from two normal
    distributions of equal width.
    """
    folders = [run_folders(path) for path in (before, after)]
    for path, found in zip((before, after), folders, strict=True):
        if not found:
            wrong = f"holds no {METRICS}" if path.is_dir() else "there is no such folder"
            raise UsageError("compare.no_run", f"{path}: {wrong}", hint="name a run, or a folder of runs")
    records = [[_finite_records(folder / METRICS) for folder in found] for found in folders]
    evaluated = [r for group in records for run in group for r in run if r["kind"] in ("valid", "final")]
    has_bits = all(isinstance(record.get("bits_per_byte"), float) for record in evaluated)
    metric = "bits_per_byte" if has_bits else "loss"
    recipes = [_recipes(path, found) for path, found in zip((before, after), folders, strict=True)]
    files = zip(*(token_paths(recipe) for group in recipes for recipe in group), strict=True)
    trained_on, held_out = (
        [read_meta(shards) for shards in map(shard_paths, paths) if all(map(_is_described, shards))]
        for paths in files
    )
    if not has_bits and len({meta.tokenizer_sha256 for meta in held_out}) > 1:
        hint = "encode the texts again, so that evaluations have bits per byte"
        message = f"{before}, {after}: losses per token of different tokenizers do not compare"
        raise UsageError("compare.other_tokenizers", message, hint=hint)
    ours, theirs = ([_curve(run, metric) for run in group] for group in records)
    rows = []
    for axis in AXES:
        ends = [curve.places[axis][-1] for curve in (*ours, *theirs) if curve.values]
        begins = [curve.places[axis][0] for curve in (*ours, *theirs) if curve.values]
        if len(ends) == len(ours) + len(theirs) and min(ends) >= max(begins):
            place = min(ends)
            of_both = ([curve.at(axis, place) for curve in group] for group in (ours, theirs))
            rows.append(_row(axis, place, *of_both, threshold=threshold))
    finals = [[curve.final for curve in group if curve.final is not None] for group in (ours, theirs)]
    if [len(some) for some in finals] == [len(ours), len(theirs)]:
        rows.append(_row("the end", None, *finals, threshold=threshold))
    if not rows:
        hint = "train them further, with train.eval_interval below train.steps"
        raise UsageError("compare.not_evaluated", f"{before}, {after}: no evaluations to compare", hint=hint)
    changes = differences(*(group[0] for group in recipes), ignore=SAME_RECIPE)
    if not _are_one_text(trained_on):
        changes += ("the training text: another",)
    if not _are_one_text(held_out):
        changes += ("the held-out text: another; losses on different texts do not compare",)
        rows = [replace(row, verdict="another text") for row in rows]
    return RunsCompared(metric, (len(ours), len(theirs)), tuple(rows), tuple(changes))


def _recipes(path: Path, found: Sequence[Path]) -> list[Recipe]:
    """Return the recipes of a folder's runs, which differ in their names and seeds only. A key that is newer than a
    recipe has its default."""
    recipes = [load_recipe(file if (file := run / RECIPE).is_file() else None) for run in found]
    for run, recipe in zip(found, recipes, strict=True):
        if changed := differences(recipes[0], recipe, ignore=SAME_RECIPE):
            message = f"{path}: {found[0].name} and {run.name} differ in more than their seeds: {changed[0]}"
            hint = "name folders whose runs have one recipe, as lmkit run --seeds makes them"
            raise UsageError("compare.other_recipes", message, hint=hint)
    seeds = Counter(recipe.run.seed for recipe in recipes)
    if len(seeds) < len(recipes):
        message = f"{path}: {max(seeds.values())} runs have the seed {max(seeds, key=seeds.__getitem__)}"
        hint = "an interval takes runs of different seeds: lmkit run RECIPE --seeds 3"
        raise UsageError("compare.one_seed_twice", message, hint=hint)
    return recipes


def _is_described(path: Path) -> bool:
    return path.is_file() and (path.suffix == ".bin" or path.with_suffix(SIDECAR).is_file())


def _are_one_text(metas: Sequence[TokenMeta]) -> bool:
    """Return whether token files hold one text. Two tokenizers may end documents by different letters, so the numbers
    of bytes and documents are compared then."""
    return all(
        meta.source_sha256 == metas[0].source_sha256
        or (
            meta.tokenizer_sha256 != metas[0].tokenizer_sha256
            and (meta.num_bytes, meta.num_documents) == (metas[0].num_bytes, metas[0].num_documents)
        )
        for meta in metas
    )


def _finite_records(path: Path) -> list[Record]:
    """Return the records of a run; refuse held-out losses that are not finite, which the file has as null."""
    records = read_metrics(path)
    for record in records:
        loss = record.get("loss", math.nan)
        if record["kind"] in ("valid", "final") and not (isinstance(loss, float) and math.isfinite(loss)):
            message = f"{path}: the held-out loss of step {record['step']} is not finite"
            hint = "a diverged run compares with nothing; train it again with a lower optimizer.lr"
            raise LmkitError("compare.not_finite", message, hint=hint)
    return records


def _row(
    at: str, place: float | None, before: Sequence[float], after: Sequence[float], *, threshold: float
) -> Difference:
    difference, reach = mean_difference(before, after)
    counts = threshold * fmean(before)
    if reach is None:
        low = high = None
        verdict = "one seed"
    else:
        low, high = difference - reach, difference + reach
        verdict = "better" if high < 0 else "worse" if low > 0 else "unclear"
        if verdict == "unclear" and max(-low, high) <= counts:
            verdict = "no difference"
    return Difference(at, place, fmean(before), fmean(after), difference, low, high, counts, verdict)


def _points(records: Sequence[Record], kind: str, *keys: str) -> list[tuple[Any, ...]]:
    """Return the values of these keys in the records of a kind that have all of them."""
    rows = (tuple(map(record.get, keys)) for record in records if record["kind"] == kind)
    return [row for row in rows if None not in row]


def _curve(records: Sequence[Record], metric: str) -> Curve:
    trained = [(0, 0, 0.0), *_points(records, "train", "step", "tokens", "seconds")]
    steps = [step for step, *_ in trained]
    held_out = sorted(each for each in _points(records, "valid", "step", metric) if each[0] <= steps[-1])
    finals = _points(records, "final", metric)
    at = [step for step, _ in held_out]
    tokens = np.interp(at, steps, [tokens for _, tokens, _ in trained])
    minutes = np.interp(at, steps, [seconds / 60 for *_, seconds in trained])
    places = {"steps": at, "tokens": tokens.tolist(), "minutes": minutes.tolist()}
    return Curve(places, [value for _, value in held_out], finals[-1][0] if finals else None)


PAGE = "report.html"

_STYLE = """
body { max-width: 60rem; margin: 0 auto; padding: 0 1rem 3rem; font: 16px/1.5 system-ui, sans-serif; color: #222; }
img { max-width: 100%; height: auto; }
.wide, pre { overflow-x: auto; }
pre { background: #f4f4f4; padding: .7rem; font-size: 13px; }
pre.text { white-space: pre-wrap; overflow-wrap: anywhere; }
table { border-collapse: collapse; }
th, td { text-align: left; padding: .2rem .9rem .2rem 0; border-bottom: 1px solid #ddd; white-space: nowrap; }
"""
_LOADS_NOTHING = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_HEAD = 1 << 16
"""Bytes of a page that hold the line above, by which a page is known."""
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Run:
    """A run folder: its name on the page, the records of `metrics.jsonl`."""

    name: str
    folder: Path
    records: list[Record]

    def points(self, kind: str, x: str, y: str) -> list[tuple[Any, ...]]:
        return _points(self.records, kind, x, y)

    def text(self, name: str) -> str:
        """Return the text of a file in the folder; "" if there is none."""
        path = self.folder / name
        return read_input(path).decode("utf-8", "replace") if path.exists() else ""


@dataclass(frozen=True)
class Page:
    """The written page."""

    path: str
    runs: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.path}: {', '.join(self.runs)}"


def write_page(
    folder: Path, others: Sequence[Path] = (), *, output: Path | None = None, force: bool = False
) -> Page:
    """Write a page about a run, beside other runs; a browser opens it without a network."""
    path = output or folder / PAGE
    is_page = path.is_file() and _LOADS_NOTHING.encode() in read_input(path)[:_HEAD]
    refuse_existing(path, force=force or (output is None and is_page), such_as=PAGE)
    folders = [folder, *others]
    sources = (RECIPE, METRICS, ENVIRONMENT, STORIES)
    refuse_replacing([path], [run / name for run in folders for name in sources])
    for run in folders:
        if not (run / METRICS).is_file():
            hint = "name a run folder that `lmkit run` or `lmkit train` made"
            raise UsageError("report.no_run", f"{run}: no {METRICS}", hint=hint)
    names = [Path(os.path.realpath(run)).name for run in folders]
    if len({*names}) < len(names):
        names = [str(run) for run in folders]
    runs = [Run(name, run, read_metrics(run / METRICS)) for name, run in zip(names, folders, strict=True)]
    write_atomic(path, _page(runs))
    return Page(str(path), tuple(names))


def _page(runs: Sequence[Run]) -> str:
    title = escape(" and ".join(run.name for run in runs))
    parts = [f"<h1>{title}</h1>", _figures(runs)]
    for x, label, unit in (("step", "step", 1), ("seconds", "minutes", 60)):
        curves: dict[str, Points] = {}
        for run in runs:
            when = {0: 0.0} | dict(run.points("train", "step", x))
            curves[f"{run.name}, training"] = [(at / unit, y) for at, y in run.points("train", x, "loss")]
            held_out = [*run.points("valid", "step", "loss"), *run.points("final", "step", "loss")]
            curves[f"{run.name}, held out"] = [(when[step] / unit, y) for step, y in held_out if step in when]
        parts.append(_picture(curves, f"Loss over {label}", label, "loss (nats per token)"))
    speed: dict[str, Points] = {run.name: run.points("train", "step", "tokens_per_second") for run in runs}
    parts.append(_picture(speed, "Throughput", "step", "tokens/s"))
    for run in runs:
        parts.append(_section(f"Texts of {run.name}", run.text(STORIES), of_text=True))
        told = "\n\n".join(f"step {step}: {text}" for step, text in run.points("sample", "step", "text"))
        parts.append(_section(f"Texts of {run.name} while it was trained", told, of_text=True))
    tables = [read_toml(run.folder / RECIPE) for run in runs]
    for run, table in zip(runs[1:], tables[1:], strict=True):
        changed = differences(tables[0], table) or ["the recipes are equal"]
        parts.append(_section(f"From {runs[0].name} to {run.name}", "\n".join(changed)))
    for run in runs:
        parts.append(_section(f"Recipe of {run.name}", run.text(RECIPE)))
        parts.append(_section(f"Environment of {run.name}", run.text(ENVIRONMENT)))
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_LOADS_NOTHING}">\n'
        f'<link rel="icon" href="data:,"><style>{_STYLE}</style></head>\n<body>\n'
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )


def _figures(runs: Sequence[Run]) -> str:
    head = ("run", "steps", "tokens", "minutes", "tokens/s", "held-out loss", "perplexity", "bits per byte")
    rows = []
    for run in runs:
        newest = {record["kind"]: record for record in run.records}
        last, judged = newest.get("train", {}), newest.get("final") or newest.get("valid", {})
        minutes = {"minutes": last["seconds"] / 60 if "seconds" in last else None}
        cells = [escape(run.name)]
        for record, key, spec in (
            *((last, "step", ",d"), (last, "tokens", ",d"), (minutes, "minutes", ".1f")),
            *((last, "tokens_per_second", ",.0f"), (judged, "loss", ".4f"), (judged, "perplexity", ".2f")),
            (judged, "bits_per_byte", ".4f"),
        ):
            value = record.get(key)
            cells.append("-" if value is None else format(value, spec))
        rows.append(cells)
    lines = ["".join(f"<td>{cell}</td>" for cell in cells) for cells in rows]
    lines.insert(0, "".join(f"<th>{name}</th>" for name in head))
    return f'<div class="wide"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def _picture(series: dict[str, Points], title: str, x_label: str, y_label: str) -> str:
    series = {name: points for name, points in series.items() if points}
    marked = [name for name in series if name.endswith("held out")]
    look: dict[str, Any] = {"title": title, "x_label": x_label, "y_label": y_label, "marked": marked}
    drawn = decorate(title, lambda: loss_curve(series, **look)) if series else None
    if drawn is None:
        return ""
    image = base64.b64encode(drawn).decode()
    return f'<p><img alt="{escape(title)}" src="data:image/png;base64,{image}"></p>'


def _section(title: str, text: str, *, of_text: bool = False) -> str:
    """Return a heading and a text below it; "" without a text."""
    style = ' class="text"' if of_text else ""
    return f"<h2>{escape(title)}</h2>\n<pre{style}>{escape(text)}</pre>" if text else ""
