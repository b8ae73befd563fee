"""Pictures never fail the work that they show, and look the same whatever the user has set."""

import logging
import sys
from pathlib import Path

import matplotlib as mpl
import pytest
from programs import run_program

from lmkit.measure import plots
from lmkit.measure.plots import decorate

DRAW = """
import sys
from lmkit.measure import plots
from lmkit.measure.plots import decorate
picture = decorate("loss.png", lambda: plots.loss_curve({"a": [(1, 2.0), (2, 1.0)]}, title="t"))
open(sys.argv[1], "wb").write(picture)
"""


def curve(name: str = "a") -> bytes:
    return plots.loss_curve({name: [(1, 2.0), (2, 1.0)], "b": [(1, 1.0)]}, title=name)


@pytest.mark.parametrize("name", ["$", "$\\frac$", "cost: $5 to $6", "\\$x$", "a_b^c", "$$"])
def test_a_name_is_no_formula(name):
    """As matplotlib's, `$\\frac$` does not parse and raises; the others would lose their signs."""
    assert (decorate("loss.png", lambda: curve(name)) or b"").startswith(b"\x89PNG")
    figures = []

    def draw() -> bytes:
        kept, plots.png = plots.png, lambda figure: figures.append(figure) or b""
        try:
            return curve(name)
        finally:
            plots.png = kept

    assert decorate("loss.png", draw) == b""
    assert not figures[0].axes[0].title.get_parse_math()


def test_settings_of_this_process_change_nothing_and_stay(monkeypatch):
    plain = decorate("loss.png", curve)
    monkeypatch.setitem(mpl.rcParams, "font.size", 40.0)
    monkeypatch.setitem(mpl.rcParams, "savefig.bbox", "tight")
    assert decorate("loss.png", curve) == plain
    assert mpl.rcParams["font.size"] == 40.0


@pytest.mark.full
def test_the_users_matplotlibrc_backend_and_cache_change_nothing(tmp_path):
    (tmp_path / "matplotlibrc").write_text("font.size: 40\nlines.linewidth: 9\ntext.usetex: True\n")
    (tmp_path / "cache").mkdir()
    for name in ("fontlist-v390.json", "fontlist-v400.json"):
        (tmp_path / "cache" / name).write_text("{broken")
    environment = {"MPLBACKEND": "module://nothing", "MPLCONFIGDIR": str(tmp_path / "cache")}
    here = run_program(sys.executable, "-c", DRAW, tmp_path / "there.png", cwd=tmp_path, **environment)
    assert here.returncode == 0, here.stderr
    drawn = decorate("x", lambda: plots.loss_curve({"a": [(1, 2.0), (2, 1.0)]}, title="t"))
    assert Path(tmp_path / "there.png").read_bytes() == drawn


@pytest.mark.parametrize("error", [RuntimeError("no\nfonts"), OSError("read-only"), ValueError("")])
def test_what_fails_is_a_warning(error, caplog):
    def draw() -> bytes:
        raise error

    with caplog.at_level(logging.WARNING, "lmkit"):
        assert decorate("loss.png", draw) is None
    (record,) = caplog.records
    assert "loss.png" in record.getMessage()
    assert "\n" not in record.getMessage()
