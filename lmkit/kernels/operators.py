"""Autograd of kernels: what a backward pass needs; attention as custom operators, into which torch.compile does not
look."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lmkit.core.attention import SECOND_DERIVATIVES
from lmkit.core.autograd import differentiable_once
from lmkit.kernels.launch import empty_in_order_of


def save_once(ctx: Any, result: Tensor, *tensors: Tensor) -> Tensor:
    """Save tensors for a `differentiable_once` backward pass, which needs an output among them: return an empty one.

    `result` may be written to in place. The gradient of an unused output is None instead of zeros.
    """
    empty = result.new_empty(0)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, empty)
    return empty


def define_attention(
    library: torch.library.Library,
    name: str,
    options: str,
    forward: Callable[..., tuple[Tensor, ...]],
    backward: Callable[..., tuple[Tensor, ...]],
) -> Callable[..., Any]:
    """Define `NAME_forward` and `NAME_backward` in the library "lmkit", with autograd; return the first.

    The schemas are given, because `torch.library.custom_op` would look for aliases in every call, which takes time.

    Args:
        library: of the file that calls this, so that the operators are freed with it: it may be loaded again.
        options: schema of the arguments after the tensors.
        forward: (q, k, v, *options) -> (out, log-sum-exp)
        backward: (dout, q, k, v, out, log-sum-exp, *options) -> (dq, dk, dv)
    """

    def shapes(q: Tensor, *_: Any) -> tuple[Tensor, ...]:
        return empty_in_order_of(q), q.new_empty(q.shape[:3], dtype=torch.float32)

    def gradient_shapes(_: Tensor, q: Tensor, k: Tensor, v: Tensor, *__: Any) -> tuple[Tensor, ...]:
        return empty_in_order_of(q), empty_in_order_of(k), empty_in_order_of(v)

    def define(part: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
        library.define(f"{name}_{part}{schema}")
        library.impl(f"{name}_{part}", function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"lmkit::{name}_{part}", fake, lib=library)
        return getattr(torch.ops.lmkit, f"{name}_{part}").default

    inputs = "Tensor q, Tensor k, Tensor v"
    operator = define("forward", f"({inputs}, {options}) -> (Tensor, Tensor)", forward, shapes)
    schema = f"(Tensor dout, {inputs}, Tensor out, Tensor lse, {options}) -> (Tensor, Tensor, Tensor)"
    gradient = define("backward", schema, backward, gradient_shapes)

    def save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        q, k, v, *ctx.options = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # else zeros would be allocated as the log-sum-exp's gradient
        ctx.save_for_backward(q, k, v, *output)

    @differentiable_once(name, instead=SECOND_DERIVATIVES)
    def differentiate(ctx: Any, saved: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *gradient(grads[0], *saved, *ctx.options), *[None] * len(ctx.options)

    torch.library.register_autograd(f"lmkit::{name}_forward", differentiate, setup_context=save, lib=library)
    return operator
