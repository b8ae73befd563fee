"""Learning rate as a function of progress.

Every schedule is a pure function of `step`, which need not be whole: a run that is bounded by time passes
`fraction_of_time_used * total_steps`. The first update of a run is step 1, so that warm-up does not waste it on a
learning rate of zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable


def cosine_lr(step: float, *, lr: float, min_lr: float, warmup_steps: float, total_steps: float) -> float:
    """Linear warm-up from 0 to `lr`, then half a cosine down to `min_lr` (Loshchilov and Hutter 2017, "SGDR", eq. 5),
    which stays.

    Args:
        step: progress, in updates; 0 is before the first.
        warmup_steps: step at which `lr` is reached; 0: at once.
        total_steps: step at which `min_lr` is reached.
    """
    if step < warmup_steps:
        return lr * step / warmup_steps
    height = 0.5 * (1 + math.cos(math.pi * _descent(step, warmup_steps, total_steps)))
    return min_lr + (lr - min_lr) * height


def linear_lr(step: float, *, lr: float, min_lr: float, warmup_steps: float, total_steps: float) -> float:
    """As `cosine_lr`, with a straight line down."""
    if step < warmup_steps:
        return lr * step / warmup_steps
    return min_lr + (lr - min_lr) * (1 - _descent(step, warmup_steps, total_steps))


def constant_lr(step: float, *, lr: float, min_lr: float, warmup_steps: float, total_steps: float) -> float:
    """Linear warm-up, then `lr` for ever; `min_lr` and `total_steps` play no part."""
    return lr * step / warmup_steps if step < warmup_steps else lr


SCHEDULES: dict[str, Callable[..., float]] = {
    "cosine": cosine_lr,
    "linear": linear_lr,
    "constant": constant_lr,
}


def _descent(step: float, warmup_steps: float, total_steps: float) -> float:
    """How much of the way down is behind us once warm-up is over: 0 to 1."""
    return 1.0 if step >= total_steps else (step - warmup_steps) / (total_steps - warmup_steps)
