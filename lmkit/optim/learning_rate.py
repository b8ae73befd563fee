"""Compute the learning rate from the progress of training.

Every schedule is a pure function of `step`, which may be fractional: a run that is bounded by time passes
`fraction_of_time_used * total_steps`. Updates count from 1: at step 0 the rate would be zero and the
update would have no effect.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from lmkit.recipe.tables import OptimizerConfig
from lmkit.registry import SCHEDULES


def learning_rate(table: OptimizerConfig, steps: int) -> Callable[[int, float | None], float]:
    """Return the function (step, used fraction of `train.max_minutes` or None) -> learning rate.

    Args:
        table: [optimizer] of the recipe: `lr`, `schedule`, ...
        steps: `train.steps`.

    Warm-up counts steps. Afterwards the schedule follows steps or time, whichever has advanced further, so that it
    always reaches its end.
    """
    schedule = partial(
        SCHEDULES.load(table.schedule),
        lr=table.lr,
        min_lr=table.min_lr,
        warmup_steps=table.warmup_steps,
        total_steps=steps,
        **{key: getattr(table, key) for key in SCHEDULES.facts(table.schedule).uses},
    )

    def rate(step: int, fraction: float | None) -> float:
        position: float = step + 1  # the update that is about to be made
        if fraction is not None and position >= table.warmup_steps:
            position = max(position, fraction * steps)
        return schedule(position)

    return rate


def schedule_warnings(table: OptimizerConfig, steps: int) -> list[str]:
    """Return a warning if the learning rate never comes down from its top."""
    rate = learning_rate(table, steps)
    before, last = (rate(step, None) for step in (max(0, steps - 2), steps - 1))
    if table.warmup_steps >= steps:
        return [
            f"optimizer.warmup_steps = {table.warmup_steps} is not below train.steps = {steps}: "
            f"the learning rate reaches {max(before, last):.4g} of optimizer.lr = {table.lr:.4g}"
        ]
    if last > before:
        return [
            f"the learning rate still rises at the last step (train.steps = {steps}), "
            f"from {before:.4g} to {last:.4g}"
        ]
    return []


@SCHEDULES.register("cosine", order=1)
def cosine_lr(step: float, *, lr: float, min_lr: float, warmup_steps: float, total_steps: float) -> float:
    """Return the learning rate: linear warm-up from 0 to `lr`, half a cosine down to `min_lr` (Loshchilov and Hutter
    2017, "SGDR", eq. 5), then `min_lr`.

    >>> cosine_lr(55, lr=1.0, min_lr=0.0, warmup_steps=10, total_steps=100)
    0.5

    Args:
        step: progress in updates; the first update is step 1.
        warmup_steps: step at which `lr` is reached; 0 starts there.
        total_steps: step at which `min_lr` is reached.
    """
    if step < warmup_steps:
        return lr * step / warmup_steps
    height = 0.5 * (1 + math.cos(math.pi * _descent(step, warmup_steps, total_steps)))
    return min_lr + (lr - min_lr) * height


@SCHEDULES.register("linear", order=2)
def linear_lr(step: float, *, lr: float, min_lr: float, warmup_steps: float, total_steps: float) -> float:
    """Return the learning rate: as `cosine_lr`, with a straight line down."""
    if step < warmup_steps:
        return lr * step / warmup_steps
    return min_lr + (lr - min_lr) * (1 - _descent(step, warmup_steps, total_steps))


@SCHEDULES.register("constant", order=3)
def constant_lr(step: float, *, lr: float, min_lr: float, warmup_steps: float, total_steps: float) -> float:
    """Return the learning rate: linear warm-up, then `lr`; `min_lr` and `total_steps` are not used."""
    return lr * step / warmup_steps if step < warmup_steps else lr


@SCHEDULES.register("wsd", order=4, uses=("cooldown_steps",))
def wsd_lr(
    step: float,
    *,
    lr: float,
    min_lr: float,
    warmup_steps: float,
    total_steps: float,
    cooldown_steps: float | None = None,
) -> float:
    """Return the learning rate: linear warm-up, `lr`, a straight line down to `min_lr` (Hu et al. 2024, "MiniCPM").

    >>> [wsd_lr(s, lr=1.0, min_lr=0.0, warmup_steps=10, total_steps=100, cooldown_steps=20) for s in (50, 80, 90)]
    [1.0, 1.0, 0.5]

    Args:
        cooldown_steps: length of the way down, which ends at `total_steps`; None: 40% of them.
    """
    if cooldown_steps is None:
        cooldown_steps = 0.4 * total_steps
    start = max(warmup_steps, total_steps - cooldown_steps)
    if step < warmup_steps:
        return lr * step / warmup_steps
    return lr if step < start else min_lr + (lr - min_lr) * (1 - _descent(step, start, total_steps))


def _descent(step: float, warmup_steps: float, total_steps: float) -> float:
    """Return the share of the way down that is done, 0 to 1, once warm-up is over."""
    return 1.0 if step >= total_steps else (step - warmup_steps) / (total_steps - warmup_steps)
