"""Clipping of gradients by their global norm."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def clip_gradients_(params: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale all gradients by one factor so that their joint Euclidean norm is at most `max_norm` (Pascanu et al.
    2013, algorithm 1).

    Args:
        params: parameters on one device; those without a gradient are passed over.
        max_norm: inf only measures.

    Returns:
        The norm before clipping, a float32 scalar on the gradients' device: nothing waits for the device. Where it is
        not finite the gradients are of no use, and it is for the caller to refuse them.

    Raises:
        ValueError: `max_norm` is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}")
    grads = [param.grad for param in params if param.grad is not None]
    norm = gradient_norm(grads)
    if grads and max_norm != float("inf"):
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # 1e-6: a norm of zero divides nothing
        torch._foreach_mul_(grads, factor.to(grads[0].device))
    return norm


@torch.no_grad()
def gradient_norm(grads: list[Tensor]) -> Tensor:
    """The joint Euclidean norm of tensors on one device, summed in float32 (float64 for float64), as a scalar."""
    if not grads:
        return torch.zeros(())
    wide = torch.promote_types(grads[0].dtype, torch.float32)
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2, wide)))
