"""Learning-rate schedules: linear warm-up, then a curve down.

A schedule is a pure function of `step`, the number of the update, counted from 1: at 0 the rate would be zero and the
update would have no effect. (Batches are counted from 0: update i + 1 uses the batch i.) `step` may be fractional: a
run that is bounded by time passes `fraction_of_time_used * total_steps`.
"""

from __future__ import annotations

import math


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


def linear_lr(step: float, *, lr: float, min_lr: float, warmup_steps: float, total_steps: float) -> float:
    """Return the learning rate: as `cosine_lr`, with a straight line down."""
    if step < warmup_steps:
        return lr * step / warmup_steps
    return min_lr + (lr - min_lr) * (1 - _descent(step, warmup_steps, total_steps))


def constant_lr(step: float, *, lr: float, min_lr: float, warmup_steps: float, total_steps: float) -> float:
    """Return the learning rate: linear warm-up, then `lr`; `min_lr` and `total_steps` are not used."""
    return lr * step / warmup_steps if step < warmup_steps else lr


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


def _descent(step: float, start: float, end: float) -> float:
    """Return the share of the way down from `start` to `end` that is done at a step after `start`, 0 to 1."""
    return 1.0 if step >= end else (step - start) / (end - start)
