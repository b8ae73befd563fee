"""Bars on a terminal: what else is said and drawn there keeps its place."""

from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Callable, Iterator

import pytest

from lmkit.cli.console import log_to_stderr, progress_on_stderr
from lmkit.training.metrics import BarConsole


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    """Whose handlers are put back."""
    log = logging.getLogger("lmkit")
    before = log.handlers, log.level, log.propagate
    yield log
    log.handlers, log.level, log.propagate = before


def test_the_log_speaks_above_a_bar(as_terminal: Callable[[], io.StringIO], log: logging.Logger) -> None:
    terminal = as_terminal()
    log_to_stderr()  # before there is a bar, as in a command
    with progress_on_stderr() as report:
        report("stories", 1, 2)
        log.info("half of it")
    assert re.search(r"(\n|\x1b\[2K)half of it\n", terminal.getvalue())


def test_a_stage_that_is_done_leaves_the_terminal_to_the_bar_of_training(
    as_terminal: Callable[[], io.StringIO],
) -> None:
    terminal = as_terminal()
    with progress_on_stderr() as report:
        report("encode", 1, 2)
        report("encode", 2, 2)
        assert terminal.getvalue().endswith("\x1b[2K")  # erased, and no thread draws it again
        bar = BarConsole(10, first_step=5)
        bar.note("a line above")
        bar.close()
        assert "step 5/10" in terminal.getvalue()
        after = terminal.getvalue().partition("step 5/10")[2]
        assert "encode" not in after
        report("stories", 1, 2)  # another one may begin
    assert "stories" in terminal.getvalue().partition("step 5/10")[2]


def test_there_is_one_bar_at_a_time(as_terminal: Callable[[], io.StringIO]) -> None:
    terminal = as_terminal()
    with progress_on_stderr() as report:
        report("building", 1, 3)  # and no more: the last one is not reported
        report("timing", 1, 2)
        sys.stderr.write("from here\n")
        report("timing", 1, 2)
    after = terminal.getvalue().partition("from here")[2]
    assert "timing" in after
    assert "building" not in after
