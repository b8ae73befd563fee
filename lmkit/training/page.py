"""One self-contained HTML page about runs: curves, figures, texts, recipe, environment. `lmkit report RUN --html`."""

from __future__ import annotations

import base64
import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from lmkit.errors import LmkitError, UsageError, reason, some_of
from lmkit.measure.decoration import decorate
from lmkit.measure.plots import loss_curve
from lmkit.recipe.load import read_toml
from lmkit.recipe.run_folder import ENVIRONMENT, METRICS, RECIPE, STORIES
from lmkit.recipe.schema import differences
from lmkit.storage import write_atomic
from lmkit.storage.inputs import parse_object, read_input
from lmkit.storage.outputs import refuse_existing, refuse_replacing
from lmkit.training.metrics import CUT, check_metrics

PAGE = "report.html"
Record = dict[str, Any]
log = logging.getLogger("lmkit")

_STYLE = """
body { max-width: 60rem; margin: 0 auto; padding: 0 1rem 3rem; font: 16px/1.5 system-ui, sans-serif; color: #222; }
img { max-width: 100%; height: auto; }
.wide, pre { overflow-x: auto; }
pre { background: #f4f4f4; padding: .7rem; font-size: 13px; }
pre.text { white-space: pre-wrap; overflow-wrap: anywhere; }
table { border-collapse: collapse; }
th, td { text-align: left; padding: .2rem .9rem .2rem 0; border-bottom: 1px solid #ddd; white-space: nowrap; }
@media (max-width: 40rem) {
  table, tbody, tr, td { display: block; }
  tr.head { display: none; }
  tr { margin-bottom: 1rem; }
  td { display: flex; justify-content: space-between; padding-right: 0; white-space: normal; }
  td::before { content: attr(data-name); padding-right: 1rem; white-space: nowrap; color: #666; }
}
"""
_LOADS_NOTHING = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_HEAD = 1 << 16
"""Bytes of a page that hold the line above, by which a page is known."""


@dataclass(frozen=True)
class Run:
    """What a run folder holds.

    Attributes:
        name: by which the page calls it.
        recipe: its tables, as they stand in `recipe.toml`.
        records: of `metrics.jsonl`.
        environment: text of `environment.json`; "{}" without one.
        text: what the run wrote; "" if nothing.
    """

    name: str
    folder: Path
    recipe: dict[str, Any]
    records: list[Record]
    environment: str
    text: str

    def of_kind(self, kind: str) -> list[Record]:
        return [record for record in self.records if record["kind"] == kind]

    def points(self, kind: str, x: str, y: str) -> list[tuple[float, float]]:
        return [(r[x], r[y]) for r in self.of_kind(kind) if r.get(x) is not None and r.get(y) is not None]


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
    """Write a page about a run, beside other runs; a browser opens it without a network.

    Args:
        output: the file; None: `report.html` in the run folder, where an older page is replaced.
        force: replace a file that exists.

    Raises:
        UsageError: a folder is no run, or has no metrics yet; the output exists, is a folder,
            or is read for the page.
        LmkitError: a file in it is damaged.
    """
    path = output or folder / PAGE
    is_page = path.is_file() and _LOADS_NOTHING.encode() in read_input(path)[:_HEAD]
    refuse_existing(path, force=force or (output is None and is_page), such_as=PAGE)
    folders = [folder, *others]
    sources = (RECIPE, METRICS, ENVIRONMENT, STORIES)
    refuse_replacing([path], [run / name for run in folders for name in sources])
    parts = [list(Path(os.path.realpath(path)).parts) for path in folders]
    depth = 1
    while len({tuple(names[-depth:]) for names in parts}) < len({tuple(names) for names in parts}):
        depth += 1
    runs = [_read_run(path, "/".join(names[-depth:])) for path, names in zip(folders, parts, strict=True)]
    write_atomic(path, _page(runs))
    return Page(str(path), tuple(run.name for run in runs))


def _read_run(folder: Path, name: str) -> Run:
    if not (folder / METRICS).is_file():
        hint = "name a run folder that `lmkit run` or `lmkit train` made"
        raise UsageError("report.no_run", f"{folder}: no {METRICS}", hint=hint)
    records, mistakes = check_metrics(folder / METRICS)
    if damaged := [text for text in mistakes if CUT not in text]:
        raise LmkitError(
            "rows.damaged",
            f"{folder / METRICS}: not what lmkit writes: {some_of(damaged)}",
            hint="delete these lines to do without them",
        )
    if mistakes:
        log.warning("%s: left out: %s", folder / METRICS, some_of(mistakes))
    return Run(
        name,
        folder,
        read_toml(folder / RECIPE),
        records,
        _environment(folder / ENVIRONMENT),
        _text_of(folder / STORIES),
    )


def _environment(path: Path) -> str:
    try:
        return json.dumps(parse_object(_text_of(path) or "{}"), indent=1)
    except (ValueError, RecursionError) as error:
        hint = "move it away: the page does without it"
        raise LmkitError("report.damaged", f"{path}: not what lmkit wrote ({error})", hint=hint) from error


def _text_of(path: Path) -> str:
    """Return a file's text; "" if there is none.

    Raises:
        LmkitError: it cannot be read.
    """
    try:
        return read_input(path).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        hint = "make the file readable, or move it away"
        raise LmkitError("report.unreadable", f"{path}: {reason(error)}", hint=hint) from error


def _page(runs: Sequence[Run]) -> str:
    title = escape(" and ".join(run.name for run in runs))
    parts = [f"<h1>{title}</h1>", _figures(runs)]
    parts += [
        _losses(runs, "step", "step", lambda x: x),
        _losses(runs, "seconds", "minutes", lambda x: x / 60),
    ]
    speed = {run.name: run.points("train", "step", "tokens_per_second") for run in runs}
    parts.append(_picture(speed, "Throughput", "step", "tokens/s"))
    for run in runs:
        if run.text:
            parts.append(_section(f"Texts of {run.name}", f'<pre class="text">{escape(run.text)}</pre>'))
        if samples := run.points("sample", "step", "text"):
            told = "\n\n".join(f"step {step}: {text}" for step, text in samples)
            title = f"Texts of {run.name} while it was trained"
            parts.append(_section(title, f'<pre class="text">{escape(told)}</pre>'))
    first, *others = runs
    for run in others:
        changed = differences(first.recipe, run.recipe) or ["the recipes are equal"]
        parts.append(_section(f"From {first.name} to {run.name}", _pre("\n".join(changed))))
    for run in runs:
        parts.append(_section(f"Recipe of {run.name}", _pre(_text_of(run.folder / RECIPE))))
        parts.append(_section(f"Environment of {run.name}", _pre(run.environment)))
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_LOADS_NOTHING}">\n'
        f'<link rel="icon" href="data:,"><style>{_STYLE}</style></head>\n<body>\n'
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _figures(runs: Sequence[Run]) -> str:
    head = ("run", "steps", "tokens", "minutes", "tokens/s", "held-out loss", "perplexity", "bits per byte")
    rows = []
    for run in runs:
        trained, held_out = run.of_kind("train")[-1:], (run.of_kind("final") or run.of_kind("valid"))[-1:]
        last, judged = (found[0] if found else {} for found in (trained, held_out))
        seconds = last.get("seconds")
        rows.append(
            (
                escape(run.name),
                _number(last.get("step"), ",d"),
                _number(last.get("tokens"), ",d"),
                _number(None if seconds is None else seconds / 60, ".1f"),
                _number(last.get("tokens_per_second"), ",.0f"),
                _number(judged.get("loss"), ".4f"),
                _number(judged.get("perplexity"), ".2f"),
                _number(judged.get("bits_per_byte"), ".4f"),
            )
        )
    lines = []
    for row in rows:  # on a narrow screen the cells stand one below the other, each with its name
        cells = (f'<td data-name="{name}">{cell}</td>' for name, cell in zip(head, row, strict=True))
        lines.append(f"<tr>{''.join(cells)}</tr>")
    heads = "".join(f"<th>{name}</th>" for name in head)
    return f'<div class="wide"><table><tr class="head">{heads}</tr>{"".join(lines)}</table></div>'


def _number(value: Any, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def _losses(runs: Sequence[Run], x: str, label: str, unit: Callable[[float], float]) -> str:
    series = {}
    for run in runs:
        when = {0: 0.0} | dict(run.points("train", "step", x))
        series[f"{run.name}, training"] = [(unit(at), y) for at, y in run.points("train", x, "loss")]
        held_out = [*run.points("valid", "step", "loss"), *run.points("final", "step", "loss")]
        series[f"{run.name}, held out"] = [(unit(when[step]), y) for step, y in held_out if step in when]
    marked = [name for name in series if name.endswith("held out")]
    return _picture(series, f"Loss over {label}", label, "loss (nats per token)", marked)


def _picture(
    series: dict[str, list[tuple[float, float]]],
    title: str,
    x_label: str,
    y_label: str,
    marked: Sequence[str] = (),
) -> str:
    series = {name: points for name, points in series.items() if points}
    if not series:
        return ""
    look: dict[str, Any] = {"title": title, "x_label": x_label, "y_label": y_label, "marked": marked}
    drawn = decorate(title, lambda: [loss_curve(series, width=width, **look) for width in (8.0, 4.2)])
    if drawn is None:
        return ""
    wide, narrow = (base64.b64encode(picture).decode("ascii") for picture in drawn)
    return (
        f'<p><picture><source media="(max-width: 40rem)" srcset="data:image/png;base64,{narrow}">'
        f'<img alt="{escape(title)}" src="data:image/png;base64,{wide}"></picture></p>'
    )


def _section(title: str, content: str) -> str:
    return f"<h2>{escape(title)}</h2>\n{content}"


def _pre(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"
