"""Run an attention kernel with its gradients, and hold the errors of its tensors; for tests and benches."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

AttentionFunction = Callable[..., Tensor]
NAMES = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Error:
    """Distance of one tensor from the exact one, in a unit that the check chooses.

    Attributes:
        overall: the root mean square distance of a row (one head's vector).
        worst_row: the largest distance of a row, which shows a fault in one row of thousands.
    """

    overall: float
    worst_row: float


def run_attention(
    function: AttentionFunction, q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None, **options: object
) -> tuple[Tensor, ...]:
    """Return (out,), or (out, dq, dk, dv) if there is `dout`; inputs keep their strides and get no gradients."""
    if dout is None:
        with torch.no_grad():
            return (function(q, k, v, **options),)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = function(*leaves, **options)
    return (out.detach(), *torch.autograd.grad(out, leaves, dout))
