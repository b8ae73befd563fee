"""SwiGLU's activation, silu(gate) * up, on the joined projection gate|up (Shazeer 2020, eq. 6).

With s = sigmoid(gate):

    y = gate s up        dgate = dy up s (1 + gate (1 - s))        dup = dy gate s

Reads both halves once and writes y; the backward pass writes the gradients where the halves were.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmkit.core.autograd import differentiable_once
from lmkit.kernels.launch import LaunchCache, Start, count_tiles, prepare_launch
from lmkit.kernels.operators import define

BLOCK = 1024  # elements of the result a program
WARPS = 4


def swiglu(joint: Tensor) -> Tensor:
    """Return silu(gate) * up: (..., 2 d_ff), gate before up, -> (..., d_ff). Differentiable once.

    The backward pass of an eager call overwrites `joint` with its gradient, unless `joint` is a leaf. So it runs
    once: autograd refuses a second pass through a retained graph, and the backward pass of any other function that
    saved `joint`.
    """
    if torch.compiler.is_compiling():
        return forward_operator(joint)
    return SwiGLU.apply(joint)[0]


@triton.jit
def swiglu_kernel(joint_pointer, out_pointer, total, D_FF: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK elements of the result a program, across the ends of rows."""
    index, gate_at, inside = _places(total, D_FF, BLOCK)
    gate = tl.load(joint_pointer + gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(joint_pointer + gate_at + D_FF, mask=inside, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_pointer + index, out.to(out_pointer.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_gradient_kernel(
    joint_pointer,
    grad_pointer,
    grad_joint_pointer,  # perhaps the joint's
    total,
    D_FF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index, gate_at, inside = _places(total, D_FF, BLOCK)
    gate = tl.load(joint_pointer + gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(joint_pointer + gate_at + D_FF, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_pointer + index, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    grad_gate = grad * up * s * (1 + gate * (1 - s))
    grad_up = grad * gate * s
    kind: tl.constexpr = grad_joint_pointer.dtype.element_ty
    tl.store(grad_joint_pointer + gate_at, grad_gate.to(kind), mask=inside)
    tl.store(grad_joint_pointer + gate_at + D_FF, grad_up.to(kind), mask=inside)


@triton.jit
def _places(total, D_FF: tl.constexpr, BLOCK: tl.constexpr):
    """Return (places in the result, places of their gates in the joint array, which of them exist)."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return index, (index // D_FF) * (2 * D_FF) + index % D_FF, index < total


def _prepare(kernel: Any) -> Any:
    def prepare(tensors: tuple[Tensor, ...], options: tuple) -> Start:
        total = tensors[0].numel() // 2
        constants = {"D_FF": tensors[0].shape[-1] // 2, "BLOCK": BLOCK, "num_warps": WARPS}
        return prepare_launch(kernel, (count_tiles(total, BLOCK), 1), tensors, (total,), constants)

    return prepare


forward_calls = LaunchCache(_prepare(swiglu_kernel))
backward_calls = LaunchCache(_prepare(swiglu_gradient_kernel))


def forward(joint: Tensor) -> Tensor:
    joint = joint.contiguous()
    out = joint.new_empty(*joint.shape[:-1], joint.shape[-1] // 2)
    if out.numel():
        forward_calls((joint,), (out,), ())
    return out


def backward(joint: Tensor, grad: Tensor, grad_joint: Tensor | None = None) -> Tensor:
    """Return the gradient of the contiguous `joint`, written into `grad_joint` if it is given."""
    grad_joint = torch.empty_like(joint) if grad_joint is None else grad_joint
    if grad.numel():
        backward_calls((joint, grad.contiguous()), (grad_joint,), ())
    return grad_joint


class SwiGLU(torch.autograd.Function):
    """`apply(joint)` returns (result, an empty tensor)."""

    @staticmethod
    def forward(ctx: Any, joint: Tensor) -> tuple[Tensor, Tensor]:
        ctx.in_place = not joint.is_leaf
        joint = joint.contiguous()
        # `differentiable_once` needs an output among the saved tensors; the result may be written to in place.
        empty = joint.new_empty(0)
        ctx.set_materialize_grads(False)  # or autograd would allocate zeros as the gradient of `empty`
        ctx.save_for_backward(joint, empty)
        return forward(joint), empty

    @staticmethod
    @differentiable_once("swiglu", instead="silu(gate) * up in PyTorch's operations has a second derivative")
    def backward(ctx: Any, saved: Any, grad: Tensor, _: None) -> tuple[Tensor]:
        joint = saved[0].detach()
        if not ctx.in_place:
            return (backward(joint, grad),)
        backward(joint, grad, joint)
        torch.autograd.graph.increment_version(joint)  # others that saved it find out
        return (joint,)


_LIBRARY = torch.library.Library("lmkit", "FRAGMENT")
forward_operator = define(
    _LIBRARY,
    "swiglu(Tensor joint) -> Tensor",
    forward,
    lambda joint: joint.new_empty(*joint.shape[:-1], joint.shape[-1] // 2),
)
backward_operator = define(
    _LIBRARY,
    "swiglu_backward(Tensor joint, Tensor grad) -> Tensor",
    lambda joint, grad: backward(joint.contiguous(), grad),
    lambda joint, grad: joint.new_empty(joint.shape),
)
torch.library.register_autograd(
    "lmkit::swiglu",
    lambda ctx, grad: backward_operator(*ctx.saved_tensors, grad),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    lib=_LIBRARY,
)
