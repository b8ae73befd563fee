"""Pictures never fail the work that they show, and look the same whatever the user has set."""

import logging

import matplotlib as mpl
import pytest

from lmkit.measure import plots
from lmkit.measure.plots import decorate


def curve(name: str = "a") -> bytes:
    return plots.loss_curve({name: [(1, 2.0), (2, 1.0)], "b": [(1, 1.0)]}, title=name)


def test_settings_of_this_process_change_nothing_and_stay(monkeypatch):
    plain = decorate("loss.png", curve)
    monkeypatch.setitem(mpl.rcParams, "font.size", 40.0)
    monkeypatch.setitem(mpl.rcParams, "savefig.bbox", "tight")
    assert decorate("loss.png", curve) == plain
    assert mpl.rcParams["font.size"] == 40.0


@pytest.mark.parametrize("error", [RuntimeError("no\nfonts"), OSError("read-only"), ValueError("")])
def test_what_fails_is_a_warning(error, caplog):
    def draw() -> bytes:
        raise error

    with caplog.at_level(logging.WARNING, "lmkit"):
        assert decorate("loss.png", draw) is None
    (record,) = caplog.records
    assert "loss.png" in record.getMessage()
    assert "\n" not in record.getMessage()
