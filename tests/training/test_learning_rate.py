"""Schedules at the points that define them."""

import math

import pytest
from raising import raises

from lmkit.core.schedule import constant_lr, cosine_lr, linear_lr, wsd_lr
from lmkit.errors import UsageError
from lmkit.recipe.tables import OptimizerConfig
from lmkit.registry import SCHEDULES
from lmkit.training.setup import learning_rate, schedule_warnings

SHAPE = {"lr": 1.0, "min_lr": 0.1, "warmup_steps": 10, "total_steps": 110}


@pytest.mark.parametrize("name", SCHEDULES.names)
def test_warm_up_is_a_straight_line_from_zero(name):
    schedule = SCHEDULES.load(name)
    assert [schedule(step, **SHAPE) for step in (0, 1, 5, 10)] == pytest.approx([0, 0.1, 0.5, 1.0])
    assert schedule(0, **{**SHAPE, "warmup_steps": 0}) == 1.0
    assert schedule(2, **{**SHAPE, "warmup_steps": 4, "total_steps": 4}) == 0.5


def test_cosine():
    values = [cosine_lr(step, **SHAPE) for step in (10, 35, 60, 85, 110, 111, 10**6)]
    quarter = 0.9 * (1 + 2**-0.5) / 2
    assert values == pytest.approx([1.0, 0.1 + quarter, 0.55, 1.0 - quarter, 0.1, 0.1, 0.1])


def test_linear_and_constant():
    assert [linear_lr(step, **SHAPE) for step in (10, 60, 110, 200)] == pytest.approx([1.0, 0.55, 0.1, 0.1])
    assert [constant_lr(step, **SHAPE) for step in (10, 60, 110, 200)] == [1.0] * 4


@pytest.mark.parametrize(
    ("cooldown", "at", "rates"),
    [
        (20, (9, 10, 90, 100, 110, 200), (0.9, 1.0, 1.0, 0.55, 0.1, 0.1)),
        (None, (66, 88, 110), (1.0, 0.55, 0.1)),  # 40% of 110 steps
        (1000, (5, 10, 60), (0.5, 1.0, 0.55)),  # begins where the warm-up ends
        (0, (109, 110), (1.0, 0.1)),
    ],
)
def test_wsd(cooldown, at, rates):
    assert [wsd_lr(step, **SHAPE, cooldown_steps=cooldown) for step in at] == pytest.approx(rates)


def test_wsd_takes_its_key_from_the_recipe():
    rate = learning_rate(OptimizerConfig(lr=1.0, schedule="wsd", cooldown_steps=10), 100)
    assert [rate(step - 1, None) for step in (90, 95, 100)] == pytest.approx([1.0, 0.5, 0.0])


def test_the_learning_rate_follows_the_steps_or_the_time_whichever_is_further():
    rate = learning_rate(OptimizerConfig(lr=1.0, warmup_steps=10, schedule="linear"), 100)
    assert rate(0, None) == pytest.approx(0.1)
    assert rate(4, 0.9) == pytest.approx(0.5)  # warm-up counts steps
    assert rate(54, None) == pytest.approx(0.5)
    assert rate(54, 0.1) == rate(54, None)
    assert rate(20, 0.55) == pytest.approx(0.5)
    assert rate(20, 1.5) == 0.0


def test_a_fraction_of_time_is_a_fractional_step():
    assert cosine_lr(0.5 * 110, **SHAPE) == cosine_lr(55, **SHAPE)
    assert cosine_lr(54.9, **SHAPE) > cosine_lr(55, **SHAPE) > cosine_lr(55.1, **SHAPE)


def test_a_warm_up_that_fills_the_run_ends_at_the_minimum():
    assert cosine_lr(10, **{**SHAPE, "total_steps": 10}) == pytest.approx(0.1)


def test_warnings_leave_the_word_to_those_who_print_them():
    """`warning: warning: ...`, where the command line puts the word before every warning."""
    (never,) = schedule_warnings(OptimizerConfig(warmup_steps=10), 5)
    assert "optimizer.warmup_steps" in never
    assert not never.startswith("warning")


@pytest.mark.parametrize("wrong", [math.nan, math.inf, "0.1", None])
def test_a_rate_that_is_no_finite_number_is_refused(wrong):
    SCHEDULES.register("odd")(lambda step, **settings: wrong)
    try:
        with raises(UsageError, "optimizer.wrong_rate", "odd", "step 1"):
            learning_rate(OptimizerConfig(schedule="odd"), 10)(0, None)
    finally:
        SCHEDULES.unregister("odd")
