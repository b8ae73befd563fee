"""Clipping of gradients by their global norm (Pascanu et al. 2013, algorithm 1), in two parts: measure, then scale.

Between the two, whoever holds only a part of the gradients adds up the norms of all parts. Our AdamW scales while it
reads the gradients; for other optimizers they are scaled where they lie, in a pass of its own.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from lmkit.optim.adamw import AdamW


@torch.no_grad()
def gradient_norm(grads: list[Tensor]) -> Tensor:
    """The joint Euclidean norm of tensors on one device, summed in float32 (float64 if one of them is float64).

    Returns:
        A scalar on their device: nothing waits for it. Where it is not finite the gradients are of no use, and it is
        for the caller to refuse them.
    """
    if not grads:
        return torch.zeros(())
    wide = functools.reduce(torch.promote_types, {grad.dtype for grad in grads}, torch.float32)
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2, wide)))


@torch.no_grad()
def clip_for(
    optimizer: torch.optim.Optimizer | None, grads: list[Tensor], norm: Tensor, max_norm: float
) -> None:
    """Make `optimizer` see gradients with a joint norm of at most `max_norm`.

    Args:
        optimizer: who reads them next (None: not known). Our AdamW gets its `gradient_factor`, and `grads` stay as
            they are.
        grads: all gradients that it has, with the joint norm `norm`.
        max_norm: inf leaves them as they are.

    Raises:
        ValueError: `max_norm` is not positive.
    """
    if not isinstance(optimizer, AdamW):
        scale_gradients_(grads, norm, max_norm)
    else:
        optimizer.gradient_factor = _factor(norm, max_norm)


@torch.no_grad()
def scale_gradients_(grads: list[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients whose joint norm is `norm` by one factor, so that it is at most `max_norm`.

    Args:
        max_norm: inf leaves them as they are.

    Raises:
        ValueError: `max_norm` is not positive.
    """
    factor = _factor(norm, max_norm)
    if grads and factor is not None:
        torch._foreach_mul_(grads, factor)


def _factor(norm: Tensor, max_norm: float) -> Tensor | None:
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}")
    if math.isinf(max_norm):
        return None
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)  # 1e-6: a norm of zero divides nothing
