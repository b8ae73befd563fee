"""Schedules at the points that define them."""

from functools import partial

import pytest

from lmkit.core.schedule import constant_lr, cosine_lr, linear_lr, wsd_lr
from lmkit.recipe.tables import OptimizerConfig
from lmkit.registry import SCHEDULES
from lmkit.training.setup import learning_rate

SHAPE = {"lr": 1.0, "min_lr": 0.1, "warmup_steps": 10, "total_steps": 110}


def wsd(cooldown_steps):
    return partial(wsd_lr, cooldown_steps=cooldown_steps)


@pytest.mark.parametrize("name", SCHEDULES.names)
def test_warm_up_is_a_straight_line_from_zero(name):
    schedule = SCHEDULES.load(name)
    assert [schedule(step, **SHAPE) for step in (0, 1, 5, 10)] == pytest.approx([0, 0.1, 0.5, 1.0])
    assert schedule(0, **{**SHAPE, "warmup_steps": 0}) == 1.0
    assert schedule(2, **{**SHAPE, "warmup_steps": 4, "total_steps": 4}) == 0.5


QUARTER = 0.9 * (1 + 2**-0.5) / 2


@pytest.mark.parametrize(
    ("schedule", "at", "rates"),
    [
        (cosine_lr, (10, 35, 60, 85), (1.0, 0.1 + QUARTER, 0.55, 1.0 - QUARTER)),
        (cosine_lr, (110, 111, 10**6), (0.1, 0.1, 0.1)),
        (linear_lr, (10, 60, 110, 200), (1.0, 0.55, 0.1, 0.1)),
        (constant_lr, (10, 60, 110, 200), (1.0,) * 4),
        (wsd(20), (9, 10, 90, 100, 110, 200), (0.9, 1.0, 1.0, 0.55, 0.1, 0.1)),
        (wsd(None), (66, 88, 110), (1.0, 0.55, 0.1)),  # 40% of 110 steps
        (wsd(1000), (5, 10, 60), (0.5, 1.0, 0.55)),  # begins where the warm-up ends
        (wsd(0), (109, 110), (1.0, 0.1)),
    ],
)
def test_points_of_a_schedule(schedule, at, rates):
    assert [schedule(step, **SHAPE) for step in at] == pytest.approx(rates)


def test_the_learning_rate_follows_the_steps_or_the_time_whichever_is_further():
    rate = learning_rate(OptimizerConfig(lr=1.0, warmup_steps=10, schedule="linear"), 100)
    assert rate(0, None) == pytest.approx(0.1)
    assert rate(4, 0.9) == pytest.approx(0.5)  # warm-up counts steps
    assert rate(54, None) == pytest.approx(0.5)
    assert rate(54, 0.1) == rate(54, None)
    assert rate(20, 0.55) == pytest.approx(0.5)
    assert rate(20, 1.5) == 0.0
