"""What every picture starts and ends with: a figure, its axes, colours, ticks, the legend, and the PNG.

matplotlib's object API on the Agg canvas: no display, no global figure list.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 130
# Okabe and Ito's colours, which colour-blind readers can tell apart, in an order with contrast between neighbours.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#7F7F7F", "#000000", "#F0E442")
MARKERS = "osD^vPX*<"
STYLES = ("-", "--", "-.", ":")


def new_figure(
    title: str, x_label: str, y_label: str, *, width: float = 8.0, height: float = 4.8
) -> tuple[Figure, Axes]:
    """One pair of axes; sizes in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    dress(axes, textwrap.fill(title, int(11 * width)), x_label, y_label)  # as many characters fit an inch
    return figure, axes


def dress(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    """Title, labels with their units, and a grid behind the data."""
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(visible=True, color="#E2E2E2", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def label_log2_ticks(axes: Axes, values: Sequence[float]) -> None:
    """A log axis labelled at the measured values themselves: 1024, not 10^3."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(values), [format(value, "g") for value in values])
    axes.minorticks_off()
    if len(values) > 8:
        axes.tick_params(axis="x", labelrotation=30)


def set_log_y(axes: Axes, values: Sequence[float]) -> None:
    """A log axis with enough numbers on it: within a decade or so also at 2 and 5, as 20 or 5,000."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    positive = [value for value in values if value > 0]
    if not positive or max(positive) > 50 * min(positive):
        return
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    write_numbers_out(axes)
    axes.yaxis.set_minor_formatter(NullFormatter())


def write_numbers_out(axes: Axes) -> None:
    """20,000 and 1,750,000 on the y axis; matplotlib would put a 1e6 into the corner."""
    from matplotlib.ticker import FuncFormatter

    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def add_legend(figure: Figure, entries: int) -> None:
    """Below the axes, where it never covers data; a single series needs none."""
    if entries > 1:
        figure.legend(loc="outside lower center", ncols=min(entries, 4), fontsize=8, frameon=False)


def png(figure: Figure) -> bytes:
    """The picture's file, the same bytes for the same figure."""
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})  # no version string: same rows, same bytes
    return out.getvalue()
