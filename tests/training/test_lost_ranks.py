"""A rank that dies, hangs or raises ends the others, and they name it."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable

import pytest
from process_faults import TIMEOUT_S
from process_fleet import Fleet, ends, newest
from run_folders import losses

from lmkit.recipe.schema import Recipe

Tiny = Callable[..., Recipe]

# What the survivor says: its own rank, the step, and who is missing. gloo notices a death at once, a hang at the
# timeout; a part of a checkpoint that does not come is noticed by whoever waits for it.
LATE = "step-00000003: rank 1 did not deliver its part"

LOST = {
    "in backward": r"rank 0, step 3: {what}; no sign of rank 1 ",
    "in evaluation": r"rank 0, after step 4: {what}; no sign of rank 1 ",
    "in a save": r"rank 0, (after )?step \d: {what}; no sign of rank 1 |" + LATE,
    "in a save that is waited for": r"rank 0, after step 6: {what}; no sign of rank 1 |" + LATE,
}


@pytest.mark.parametrize("where", LOST)
def test_fault_72_a_rank_that_dies_ends_the_other_which_names_it_and_the_step(
    where: str, fleet: Fleet, tiny: Tiny, settings: Callable[..., list[str]]
) -> None:
    sharded = ("parallel.strategy=zero1", "checkpoint.interval=3")
    fault = f"rank 1 dies {where}"
    assert fleet.train(settings(*sharded), ranks=2, fault=fault) == [1, -signal.SIGKILL], fleet.said()
    assert re.search(LOST[where].format(what="the connection broke"), fleet.said()), fleet.said()
    assert "Traceback" not in fleet.said()
    assert fleet.train(settings(*sharded), ranks=2) == [0, 0], fleet.said()
    assert newest(tiny(*sharded)).state.step == 10


def test_fault_72_a_first_rank_that_dies_while_it_looks_where_to_begin_ends_the_other(
    fleet: Fleet, settings: Callable[..., list[str]]
) -> None:
    assert fleet.train(settings(), ranks=2, fault="rank 0 dies at the start") == [-signal.SIGKILL, 1]
    assert fleet.said() == "rank 1, between steps: the connection broke; no sign of rank 0 in 2 s more\n"


@pytest.mark.parametrize("where", LOST)
def test_fault_73_a_rank_that_hangs_is_named_with_the_step_at_the_timeout(
    where: str, fleet: Fleet, tiny: Tiny, settings: Callable[..., list[str]]
) -> None:
    options = ("parallel.strategy=zero1", "checkpoint.interval=3", f"parallel.timeout_s={TIMEOUT_S}")
    waiting, hanging = fleet.start(settings(*options), ranks=2, fault=f"rank 1 hangs {where}")
    assert ends([waiting]) == [1], fleet.said()
    assert re.search(LOST[where].format(what="no answer within 2 s"), fleet.said()), fleet.said()
    assert "Traceback" not in fleet.said()
    assert hanging.is_alive() or where.startswith("in a save")  # the loop of rank 1 went on, and lost rank 0


def test_an_exception_on_one_rank_inside_backward_is_no_hang_and_the_next_run_is_clean(
    fleet: Fleet, tiny: Tiny, settings: Callable[..., list[str]]
) -> None:
    assert fleet.train(settings(), ranks=2, fault="rank 1 raises in backward") == [1, 1], fleet.said()
    assert "rank 0, step 3: the connection broke; no sign of rank 1" in fleet.said()
    assert "ZeroDivisionError: in the middle of backward" in fleet.said()
    assert fleet.train(settings(), ranks=2) == [0, 0], fleet.said()
    assert fleet.train(settings("run.name=fresh"), ranks=2) == [0, 0], fleet.said()
    assert losses(tiny()) == losses(tiny("run.name=fresh"))
