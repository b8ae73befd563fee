"""Run an attention kernel with its gradients; for tests and benches."""

from collections.abc import Callable

import torch
from torch import Tensor

AttentionFunction = Callable[..., Tensor]
NAMES = ("out", "dq", "dk", "dv")


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
