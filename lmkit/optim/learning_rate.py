"""Compute the learning rate of a recipe from the progress of training; `lmkit.core.schedule` has the curves."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from lmkit.errors import UsageError
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
        found = schedule(position)
        if not isinstance(found, int | float) or not math.isfinite(found):
            raise UsageError(
                "optimizer.wrong_rate",
                f"optimizer.schedule: {table.schedule} gives the learning rate {found!r} at step {position:g}",
                hint="a schedule returns a finite number",
            )
        return found

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
