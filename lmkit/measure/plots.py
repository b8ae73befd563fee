"""Draw PNG pictures: lines, grouped bars, heat maps, areas, a table. Callers store the bytes.

`decorate` draws them beside results that are complete without them: a picture that fails is a warning. The user's
matplotlibrc and backend change nothing, and text is shown as it is: `$` begins no formula.
"""

from __future__ import annotations

import io
import logging
import math
import os
import textwrap
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from lmkit.measure.tables import Column, Row, Rows, grouped

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can tell apart, in an order with contrast between neighbours.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#7F7F7F", "#000000", "#F0E442")
MARKERS = "osD^vPX*<"
STYLES = ("-", "--", "-.", ":")

_ABOVE: dict[str, Any] = {"xytext": (0, 3), "textcoords": "offset points", "ha": "center", "va": "bottom"}
_SLANTED: dict[str, Any] = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}

Points = Sequence[tuple[float, float]]
Whisker = tuple[float, float]
"""Lengths below and above, in the unit of the value."""
NameOf = Callable[[Row], str]
_SHORT_STATUS = {"out of memory": "OOM", "wrong result": "wrong", "skipped": "too slow"}


def _figure(
    title: str, x_label: str, y_label: str, *, width: float = 8.0, height: float = 4.8
) -> tuple[Figure, Axes]:
    figure = blank_figure(width, height)
    axes = figure.add_subplot()
    _dress(axes, textwrap.fill(title, int(11 * width)), x_label, y_label)  # as many characters fit an inch
    return figure, axes


def _dress(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(visible=True, color="#E2E2E2", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _finish(figure: Figure, columns: int = 4) -> bytes:
    """Put the legend below the axes, where it covers no data (a single series needs none), and return the file."""
    found: dict[str, Artist] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        found |= zip(labels, handles, strict=True)
    if len(found) > 1:
        look = {"ncols": min(len(found), columns), "fontsize": 8, "frameon": False}
        figure.legend(found.values(), found, loc="outside lower center", **look)
    return png(figure)


def png(figure: Figure) -> bytes:
    """Return the picture's file, the same bytes for the same figure."""
    out = io.BytesIO()
    with warnings.catch_warnings():
        # A name in another script: boxes.
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        # No version string: same rows, same bytes.
        figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def _curve(axes: Axes, points: Points, label: str, index: int, **style: Any) -> None:
    look: dict[str, Any] = {"color": COLORS[index % len(COLORS)], "linewidth": 1.5, "markersize": 5}
    places = zip(*points, strict=True) if points else ([], [])
    axes.plot(*places, label=label, **(look | style))


def _whisker(axes: Axes, x: float, y: float, whisker: Whisker) -> None:
    below, above = (max(0.0, length) for length in whisker)  # of equal samples: a rounding error
    axes.errorbar([x], [y], yerr=[[below], [above]], color="#303030", linewidth=0.9, capsize=2)


def _log_y(axes: Axes, values: Sequence[float]) -> None:
    """Make the y axis logarithmic with enough numbers: within a decade or so also at 2 and 5, as 20 or 5,000."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    positive = [value for value in values if value > 0]
    if positive and max(positive) <= 50 * min(positive):
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    _write_numbers_out(axes)  # powers of ten would be formulas


def _write_numbers_out(axes: Axes) -> None:
    """Write 1,750,000 on the y axis; matplotlib would put a 1e6 into the corner."""
    axes.yaxis.set_major_formatter("{x:,.10g}")


def of_row(row: Row, key: str) -> Whisker | None:
    """Return p10 to p90 around a time at `key`, or around `tokens_per_s` (slow samples are low rates); else None."""
    time = row.get("median_ms", row.get("step_ms"))
    value = row.get(key)
    if not time or value is None or "p10_ms" not in row:
        return None
    if key in ("median_ms", "step_ms"):
        return time - row["p10_ms"], row["p90_ms"] - time
    if key == "tokens_per_s":
        return value - value * time / row["p90_ms"], value * time / row["p10_ms"] - value
    return None


def _named(key: str | NameOf) -> NameOf:
    return (lambda row: str(row[key])) if isinstance(key, str) else key


def line_panels(
    rows: Rows,
    x: str,
    column: Column,
    *,
    panel: str | NameOf = lambda row: "",
    group: str | NameOf,
    kind: str | NameOf | None = None,
    title: str,
    x_label: str,
    log_y: bool = False,
) -> bytes:
    """Draw panels with one y axis, a line through (row[x], row[column.key]) for each (group, kind).

    The group has a colour, the kind a style; times and rates have whiskers (`of_row`). The x axis is logarithmic. A
    row without a value leaves a gap, and a note that says its status. `panel`, `group` and `kind` are keys or
    functions of a row; without `kind` each group has a style of its own.
    """
    panel_of, group_of, kind_of = _named(panel), _named(group), _named(kind) if kind else lambda row: ""
    panels = grouped(rows, panel_of) or {"": []}
    names = list(dict.fromkeys((group_of(row), kind_of(row)) for row in rows))
    groups, kinds = (list(dict.fromkeys(name[part] for name in names)) for part in (0, 1))
    found = [row for row in rows if row.get(column.key) is not None]
    line_of = grouped(found, lambda row: (panel_of(row), group_of(row), kind_of(row)))
    figure = blank_figure(max(8.0, 1.4 + 3.7 * len(panels)), 4.8)
    figure.suptitle(textwrap.fill(title, int(11 * figure.get_figwidth())), fontsize=11)
    drawn = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (panel_name, members) in zip(drawn, panels.items(), strict=True):
        _dress(axes, panel_name, x_label, "")
        for name in dict.fromkeys((group_of(row), kind_of(row)) for row in members):
            index = groups.index(name[0])
            style = kinds.index(name[1]) if kind else 0
            mark = style if kind else index
            look = {"linestyle": STYLES[style % len(STYLES)], "marker": MARKERS[mark % len(MARKERS)]}
            line = line_of.get((panel_name, *name), [])
            points = sorted((row[x], row[column.key]) for row in line)
            _curve(axes, points, ", ".join(filter(None, name)), index, **look)
            for row in line:
                if (reach := of_row(row, column.key)) is not None:
                    _whisker(axes, row[x], row[column.key], reach)
        lost = [row for row in members if row.get(column.key) is None and row.get("status", "ok") != "ok"]
        lines = [f"{row['status']}: {group_of(row)} at {row.get(x)} {kind_of(row)}" for row in lost]
        text = axes.text(0.03, 0.97, "\n".join(lines), va="top", fontsize=7.5, color="#555555")
        text.set_transform(axes.transAxes)
        if found:
            places = [row[x] for row in found]
            axes.set_xscale("log", base=2)
            ticks = sorted(set(places))
            axes.set_xticks(ticks, [format(value, "g") for value in ticks])  # 1024, not 10^3
            axes.minorticks_off()
            axes.tick_params(axis="x", labelrotation=30 if len(ticks) > 8 else 0)
            axes.set_xlim(min(places) / 1.3, max(places) * 1.3)
            if log_y:
                _log_y(axes, [row[column.key] for row in found])
    drawn[0].set_ylabel((column.axis or column.header) + (" (log scale)" if log_y else ""))
    if not log_y:
        _write_numbers_out(drawn[0])
        drawn[0].set_ylim(bottom=0)
    return _finish(figure, columns=5)


def loss_curve(
    series: Mapping[str, Points],
    *,
    title: str,
    x_label: str = "step",
    y_label: str = "loss (nats per token)",
    marked: Collection[str] = (),
    width: float = 8.0,
) -> bytes:
    """Draw training curves, `width` inches: thin lines, one per name, and a marker at each point of the `marked`."""
    figure, axes = _figure(title, x_label, y_label, width=width)
    for index, (name, points) in enumerate(series.items()):
        look = {
            "linestyle": STYLES[(index // len(COLORS) + index) % len(STYLES)],  # equal curves stay visible
            "marker": MARKERS[index % len(MARKERS)] if name in marked else None,
            "markersize": max(1.0, min(5.5, 250 / max(1, len(points)))),  # neighbours do not touch
        }
        _curve(axes, points, name, index, **look)
    return _finish(figure, columns=max(1, int(width / 2)))


def grouped_bars(
    rows: Rows,
    column: Column,
    *,
    group: str | NameOf,
    series: str | NameOf | None = None,
    title: str,
    x_label: str,
    log_y: bool = False,
) -> bytes:
    """Draw a group of bars for each `group` of the rows, and in it a bar for each `series`, with its value above it.

    Times and rates have whiskers (`of_row`). A row without a value shows its status. A series without any value is
    left out. `group` and `series` are keys or functions of a row; without `series` all rows are one series.
    """
    value, y_label, spec = column.key, column.axis or column.header, column.spec or ".3g"
    y_label += " (log scale)" if log_y else ""
    group_of, series_of = _named(group), _named(series) if series else lambda row: y_label
    groups = list(dict.fromkeys(map(group_of, rows)))
    found = {(series_of(row), group_of(row)): row for row in rows}
    names = list(dict.fromkeys(series_of(row) for row in rows if row.get(value) is not None))
    size = max(8.0, min(13.0, 1.5 + 0.3 * len(groups) * len(names)))
    figure, axes = _figure(title, x_label, y_label, width=size)
    width = 0.84 / max(1, len(names))
    present = [row[value] for row in found.values() if row.get(value)]
    log_y = log_y and bool(present)
    floor = min(present) * 0.5 if log_y else 0.0
    highest = max(present, default=0.0)
    for index, name in enumerate(names):
        color = COLORS[index % len(COLORS)]
        look: dict[str, Any] = {"color": color, "hatch": "///" if index >= len(COLORS) else None}
        places = [place + (index - (len(names) - 1) / 2) * width for place in range(len(groups))]
        members = [found.get((name, group), {}) for group in groups]
        look |= {"label": name, "edgecolor": "white", "linewidth": 0}
        axes.bar(places, [row.get(value) or 0.0 for row in members], width * 0.94, **look)
        for x, row in zip(places, members, strict=True):
            if (top := row.get(value)) is None:
                top, ink, said = floor, color, str(row.get("status", "-"))
                said = _SHORT_STATUS.get(said, said)
            else:
                said, ink = _bar_text(top, spec), "black"
                if (reach := of_row(row, value)) is not None:
                    _whisker(axes, x, top, reach)
                    top += reach[1]
            highest = max(highest, top)
            axes.annotate(said, (x, top), rotation=90, fontsize=7, color=ink, **_ABOVE)
    longest_line = max((len(line) for group in groups for line in group.split("\n")), default=0)
    axes.set_xticks(range(len(groups)), groups, **(_SLANTED if longest_line * len(groups) > 90 else {}))
    axes.grid(visible=False, axis="x")
    longest_value = max((len(_bar_text(value, spec)) for value in present), default=0)
    axes.margins(y=max(0.14, 0.022 * longest_value))  # room for the rotated values
    if log_y:
        _log_y(axes, [floor, highest * 4])
        axes.set_ylim(floor, highest * 4)
    else:
        _write_numbers_out(axes)
    return _finish(figure)


def _bar_text(value: float, spec: str) -> str:
    """Return the value without an exponent; nothing if it would read as zero, as the missing bar does."""
    text = format(value, spec)
    if "e+" in text:
        text = format(value, ",.0f")
    return text if text.strip("0.,") else ""


def heat_map(
    columns: Sequence[str],
    rows: Sequence[str],
    values: Sequence[Sequence[float | None]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    value_label: str,
    center: float | None = None,
) -> bytes:
    """Draw a grid of colours with the number values[row][column] in every cell; None is a grey cell that says "-".

    Args:
        center: the neutral value of ratios: red below, blue above, the same for 1/2 and 2; None: a plain scale.
    """
    import numpy as np
    from matplotlib.colors import LogNorm

    size = {"width": max(6.0, 2.8 + 0.8 * len(columns)), "height": max(3.0, 1.9 + 0.48 * len(rows))}
    figure, axes = _figure(title, x_label, y_label, **size)
    axes.grid(visible=False)
    axes.set_facecolor("#D0D0D0")
    present = [value for row in values for value in row if value is not None]
    colors: dict[str, Any] = {"cmap": "viridis"}
    if center is not None and present:
        reach = max(1.01, *(max(value / center, center / value) for value in present))
        colors = {"cmap": "RdBu", "norm": LogNorm(center / reach, center * reach)}
    grid = [[math.nan if value is None else value for value in row] for row in values]
    image = axes.imshow(grid, aspect="auto", **colors)
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            red, green, blue, _ = (1.0,) * 4 if value is None else image.to_rgba(np.asarray([value]))[0]
            ink = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"
            text = "-" if value is None else format(value, ".3g")
            axes.text(x, y, text, ha="center", va="center", fontsize=8, color=ink)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    if present:
        bar = figure.colorbar(image, ax=axes, label=value_label, format="{x:.3g}")  # not powers of ten
        bar.minorticks_off()
    return _finish(figure)


def stacked_areas(
    x: Sequence[float],
    layers: Mapping[str, Sequence[float]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    begins: Mapping[str, float],
) -> bytes:
    """Draw areas stacked on one another, the parts of a total over time, and a dotted line where a name begins."""
    figure, axes = _figure(title, x_label, y_label, width=9.5)
    colors = [COLORS[index % len(COLORS)] for index in range(len(layers))]
    axes.stackplot(x, list(layers.values()), labels=list(layers), colors=colors, step="post", alpha=0.85)
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    on_the_right: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
    for name, start in begins.items():
        axes.axvline(start, color="#303030", linewidth=0.9, linestyle=":")
        axes.annotate(name, (start, 1.0), (3, -3), rotation=90, va="top", fontsize=7, **on_the_right)
    return _finish(figure)


def table_picture(headers: Sequence[str], rows: Sequence[Sequence[str]], *, title: str) -> bytes:
    """Draw a table: header shaded, lines striped, columns as wide as their text."""
    from matplotlib.transforms import Bbox

    widths = [max(map(len, texts)) + 2 for texts in zip(headers, *rows, strict=True)]
    figure = blank_figure(max(4.0, 0.092 * sum(widths)), 0.7 + 0.3 * (len(rows) + 1), layout=None)
    figure.suptitle(title, fontsize=11, fontweight="bold")
    axes = figure.add_axes((0.02, 0.02, 0.96, 0.98 - 0.5 / figure.get_figheight()))
    axes.set_axis_off()
    table = axes.table(
        cellText=[list(row) for row in rows] or [[""] * len(headers)],
        colLabels=list(headers),
        colWidths=[width / sum(widths) for width in widths],
        cellLoc="center",
        bbox=Bbox.unit(),
    )
    table.auto_set_font_size(False)
    table.set_fontsize(9)
    for (line, _), cell in table.get_celld().items():
        cell.set_edgecolor("#BBBBBB")
        if line == 0:
            cell.set_text_props(fontweight="bold")
        cell.set_facecolor("#DCE6F1" if line == 0 else "#F5F5F5" if line % 2 == 0 else "white")
    return _finish(figure)


DPI = 130
Made = TypeVar("Made")

log = logging.getLogger("lmkit")


def decorate(what: str, draw: Callable[[], Made]) -> Made | None:
    """Return what `draw` returns; None, with a warning that names `what`, if it fails for whatever reason.

    Only here pictures of `measure.plots` are drawn.
    """
    try:
        with own_settings():
            return draw()
    except Exception as error:  # noqa: BLE001 (whatever it is, the results are complete)
        reason = " ".join(str(error).split())[:200]
        log.warning("%s: not drawn: %s: %s; all else is complete", what, type(error).__name__, reason)
        return None


def blank_figure(width: float, height: float, layout: Any = "constrained") -> Figure:
    """Return a figure of so many inches, inside `decorate`."""
    from matplotlib import rcParams
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    assert not rcParams["text.parse_math"], "pictures are drawn by `decorate`"
    figure = Figure(figsize=(width, height), dpi=DPI, layout=layout)
    FigureCanvasAgg(figure)
    return figure


@contextmanager
def own_settings() -> Iterator[None]:
    """Set matplotlib's defaults in place of the user's settings."""
    backend = os.environ.pop("MPLBACKEND", None)  # matplotlib cannot be imported where it does not know it
    try:
        import matplotlib
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
    defaults: Any = {key: value for key, value in matplotlib.rcParamsDefault.items() if "backend" not in key}
    defaults["text.parse_math"] = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", matplotlib.MatplotlibDeprecationWarning)  # of settings
        with matplotlib.rc_context(defaults):
            yield
