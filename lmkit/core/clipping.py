"""Clip gradients by their global norm (Pascanu et al. 2013, algorithm 1).

`clip_gradients` clips parameters that one process holds. Training measures and scales separately, because ranks that
hold parts of the gradients add up their norms in between. Our AdamW scales gradients as it reads them; for other
optimizers `clip_for` scales them in place, in a separate pass over memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import torch
from torch import Tensor


def clip_gradients(parameters: Tensor | Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale the gradients in place by one factor, so that their joint norm is at most `max_norm`.

    >>> weight = torch.zeros(2, requires_grad=True)
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> clip_gradients([weight], max_norm=1.0)
    tensor(5.)
    >>> weight.grad
    tensor([0.6000, 0.8000])

    Args:
        parameters: those without a gradient are skipped.
        max_norm: inf measures without scaling.

    Returns:
        The norm before scaling, as a scalar tensor. If it is not finite, the gradients are of no use.

    Raises:
        ValueError: `max_norm` is not positive.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else parameters
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = gradient_norm(grads)
    clip_for(None, grads, norm, max_norm)
    return norm


@torch.no_grad()
def gradient_norm(grads: list[Tensor]) -> Tensor:
    """Compute the joint Euclidean norm of tensors on one device, in float32 (in float64 if one of them is float64).

    Returns:
        A scalar tensor on their device; the host does not wait for it. The caller refuses a norm that is not finite.
    """
    if not grads:
        return torch.zeros(())
    dtypes = sorted({grad.dtype for grad in grads}, key=str)
    wide = functools.reduce(torch.promote_types, dtypes, torch.float32)
    # One call per dtype: PyTorch works on a list of mixed dtypes tensor by tensor.
    alike = [[grad for grad in grads if grad.dtype == dtype] for dtype in dtypes]
    norms = [norm for group in alike for norm in torch._foreach_norm(group, 2, wide)]
    return torch.linalg.vector_norm(torch.stack(norms))


@torch.no_grad()
def clip_for(
    optimizer: torch.optim.Optimizer | None, grads: list[Tensor], norm: Tensor, max_norm: float
) -> None:
    """Let `optimizer` read gradients with a joint norm of at most `max_norm`.

    Args:
        optimizer: the next reader of the gradients (None: not known). If it has a `gradient_factor`, as our AdamW
            does, only that is set; else `grads` are scaled in place.
        grads: all gradients of the optimizer in this process.
        norm: joint norm of the gradients of all processes.
        max_norm: inf leaves them as they are.

    Raises:
        ValueError: `max_norm` is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}")
    # 1e-6: a norm of zero must not divide
    factor = None if math.isinf(max_norm) else (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if optimizer is not None and hasattr(optimizer, "gradient_factor"):
        optimizer.gradient_factor = factor
    elif grads and factor is not None:
        torch._foreach_mul_(grads, factor)
