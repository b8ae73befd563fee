"""Draw pictures beside results that are complete without them: a picture that fails is a warning.

The user's matplotlibrc and backend change nothing, and text is shown as it is: `$` begins no formula.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 130
Made = TypeVar("Made")

log = logging.getLogger("lmkit")


def decorate(what: str, draw: Callable[[], Made]) -> Made | None:
    """Return what `draw` returns; None, with a warning in the log, if it fails for whatever reason.

    Only here pictures of `measure.plots` are drawn.

    Args:
        what: names the picture in the warning: "loss.png".
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
    defaults = {key: value for key, value in matplotlib.rcParamsDefault.items() if "backend" not in key}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", matplotlib.MatplotlibDeprecationWarning)  # of settings
        with matplotlib.rc_context({**defaults, "text.parse_math": False}):
            yield
