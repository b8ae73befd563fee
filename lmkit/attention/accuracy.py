"""What checks of an attention function begin with (run it, with its gradients) and end with (two errors a tensor)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

AttentionFunction = Callable[..., Tensor]
NAMES = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Error:
    """Distance of one tensor from the exact one, in a unit that the check chooses.

    overall: the root mean square distance of a row (one head's vector).
    worst_row: the largest distance of a single row; a fault that touches one row in thousands shows here.
    """

    overall: float
    worst_row: float


def run_attention(
    function: AttentionFunction, q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None, **options: object
) -> tuple[Tensor, ...]:
    """(out,) or (out, dq, dk, dv) of `function`; the inputs keep their strides and gather no gradients."""
    if dout is None:
        with torch.no_grad():
            return (function(q, k, v, **options),)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = function(*leaves, **options)
    return (out.detach(), *torch.autograd.grad(out, leaves, dout))
