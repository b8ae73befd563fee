"""Whether a plot is legible only eyes can tell; these check that one comes out, is not empty and is reproducible."""

import io

import numpy as np
import pytest
from marking import full_but
from matplotlib.image import imread

from lmkit.measure import plots
from lmkit.measure.tables import Column

pytestmark = pytest.mark.usefixtures("drawing")
POINTS = {"ours": [(128.0, 0.1), (1024.0, 2.0)], "theirs": [(128.0, 0.2), (1024.0, 3.0)]}
LABELS = {"title": "t", "x_label": "sequence length (tokens)", "y_label": "time (ms)"}
LINES = [{"name": name, "x": x, "y": y} for name, points in POINTS.items() for x, y in points]
BARS = [
    {"name": name, "place": place, "ms": ms, "status": "skipped"}
    for name, place, ms in (("x", "a", 1.0), ("y", "a", 2.0), ("x", "b", None), ("y", "b", 3.0))
]
GRID = (["1", "2"], ["a"])


def bars(rows, **options):
    names = {"title": "t", "x_label": "x", "group": "place", "series": "name"}
    return plots.grouped_bars(rows, column=Column("ms", "ms", ".3g"), **names, **options)


def panels(rows, **options):
    labels = {"title": "t", "x_label": "x", "group": "name"}
    return plots.line_panels(rows, "x", Column("y", "y"), **labels, **options)


PLOTS = {
    "panels": lambda: panels(LINES, panel="name", kind="name"),
    "panel of nothing": lambda: panels([{"name": "a", "x": 1, "status": "skipped"}], log_y=True),
    "loss": lambda: plots.loss_curve(POINTS, title="t", marked=list(POINTS)[:1]),
    "bars": lambda: bars(BARS),
    "no bars": lambda: bars(BARS[2:3], log_y=True),
    "heat": lambda: plots.heat_map(*GRID, [[0.5, None]], value_label="x", center=1.0, **LABELS),
    "empty heat": lambda: plots.heat_map(["1"], ["a"], [[None]], value_label="x", center=1.0, **LABELS),
    "areas": lambda: plots.stacked_areas([0, 1, 2], {"p": [1, 2, 1]}, begins={"a": 1}, **LABELS),
    "table": lambda: plots.table_picture(["a", "b"], [["1", "2"], ["3", "4"]], title="t"),
}


@pytest.mark.parametrize("name", full_but(["loss", "bars", "empty heat", "table"], PLOTS))
def test_a_picture_comes_out(name):
    pixels = imread(io.BytesIO(PLOTS[name]()))
    assert pixels.shape[0] > 80
    assert pixels.shape[1] > 400
    assert np.unique(pixels[..., :3].reshape(-1, 3), axis=0).shape[0] > 10
