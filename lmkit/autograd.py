"""What our autograd functions have in common: a backward pass that is itself no graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from lmkit.errors import UsageError

Backward = Callable[..., tuple[Tensor | None, ...]]


def differentiable_once(name: str, *, instead: str) -> Callable[[Backward], Backward]:
    """For the backward pass of an autograd function: a derivative of its gradients is refused.

    Else autograd would take them for constants and leave terms out without a word. PyTorch's own
    `once_differentiable` speaks up only where the incoming gradient requires grad; that of a loss is a constant 1.

    It is called as backward(ctx, saved, grad, *others), with what was saved, since activation checkpointing lets
    nobody unpack that twice. An output of the function, of any size, has to be among it. `grad` is the gradient of
    the first output, never None; the others may be, where the function turned `set_materialize_grads` off.

    Args:
        name: what was differentiated.
        instead: what has second derivatives.
    """

    def decorate(backward: Backward) -> Backward:
        @wraps(backward)
        def once(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            if grads[0] is None:  # what comes behind has no gradient
                return (None,) * len(ctx.needs_input_grad)
            saved = ctx.saved_tensors
            if not torch.is_grad_enabled():  # it is where create_graph=True asked for a graph
                return backward(ctx, saved, *grads)
            with torch.no_grad():
                gradients = backward(ctx, saved, *grads)
            # Our own output leads on to all inputs: autograd skips an error that is on no way to what it looks for.
            output = next(x for x in saved if x is not None and x.grad_fn is ctx)
            return _Refusal.apply(f"{name} is differentiable once", instead, output, *gradients)

        return once

    return decorate


class _Refusal(torch.autograd.Function):
    """Hands gradients on; its own backward pass is the error."""

    @staticmethod
    def forward(
        ctx: Any, message: str, hint: str, output: Tensor, *gradients: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.message, ctx.hint = message, hint
        # Not the inputs themselves: autograd lets nobody write to several views that one function returned.
        return tuple(None if gradient is None else gradient.detach() for gradient in gradients)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        raise UsageError(ctx.message, hint=ctx.hint)
