"""Refuse second derivatives of autograd functions whose backward pass builds no graph; tell where none can run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

Backward = Callable[..., tuple[Tensor | None, ...]]


def is_transformed() -> bool:
    """Whether a transform of `torch.func` runs (`grad`, `vmap`, `jvp`...), or forward-mode differentiation.

    They cannot look into an autograd function: call PyTorch's operations there, which they transform by themselves.
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def without_autocast(device_type: str) -> AbstractContextManager:
    """Disable autocast; PyTorch's context manager refuses "meta"."""
    return nullcontext() if device_type == "meta" else torch.autocast(device_type, enabled=False)


def differentiable_once(name: str, *, instead: str) -> Callable[[Backward], Backward]:
    """Decorate the backward pass of an autograd function: to differentiate its gradients again raises RuntimeError.

    Without it, autograd would take the gradients for constants and silently leave out terms. PyTorch's
    `once_differentiable` raises only if the incoming gradient requires grad; that of a loss is the constant 1.

    The decorated function is called as backward(ctx, saved, grad, *others). It gets the saved tensors as an argument
    because activation checkpointing lets them be unpacked only once. Save at least one output of the function, of any
    size: the error is attached to it. `grad` is the gradient of the first output. Where the function turned
    `set_materialize_grads` off, the gradient of an unused output is None, but at least one is a tensor.

    Args:
        name: of the function that was differentiated, for the message.
        instead: the end of the message: what has second derivatives.
    """

    def decorate(backward: Backward) -> Backward:
        @wraps(backward)
        def once(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            # No later operation sent a gradient. (The first one is usually there, and no loop runs.)
            if grads[0] is None and all(grad is None for grad in grads[1:]):
                return (None,) * len(ctx.needs_input_grad)
            saved = ctx.saved_tensors
            if not torch.is_grad_enabled():  # enabled in backward only by create_graph=True
                return backward(ctx, saved, *grads)
            with torch.no_grad():
                gradients = backward(ctx, saved, *grads)
            # Attach the error to our output, which depends on every input: elsewhere, autograd could skip it.
            output = next(x for x in saved if x is not None and x.grad_fn is ctx)
            return _Refusal.apply(
                f"{name} is differentiable once, except under torch.func; {instead}", output, *gradients
            )

        return once

    return decorate


class _Refusal(torch.autograd.Function):
    """Return the gradients unchanged; raise in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, message: str, output: Tensor, *gradients: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.message = message
        # Detached, because autograd forbids writing to one of several views that a function returned.
        return tuple(None if gradient is None else gradient.detach() for gradient in gradients)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        raise RuntimeError(ctx.message)
