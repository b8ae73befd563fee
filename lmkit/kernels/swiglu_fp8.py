"""SwiGLU between two fp8 products: `lmkit.kernels.swiglu`, which casts what it has just computed.

What the next product reads, the result and in the backward pass the gradient of gate|up, is written in 16 bits, as
the product of the weight's gradient wants it, and in fp8 with a scale for each row. That saves reading it again. The
bits are those of `cast_rows` on the result.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmkit.core.autograd import differentiable_once
from lmkit.kernels.fp8 import keep_cast, make_room, pack, scale_of_rows
from lmkit.kernels.launch import LaunchCache, Start, prepare_launch


def swiglu_and_cast(joint: Tensor) -> Tensor:
    """Return silu(gate) * up as `swiglu`, (..., 2 d_ff) -> (..., d_ff), with its cast kept beside it.

    Of the gradient of `joint` the cast is kept, too. d_ff is a multiple of 16.
    """
    out, _, low, scale = SwiGLUAndCast.apply(joint)
    keep_cast(out, (low, scale))
    return out


@triton.jit
def swiglu_cast_kernel(
    joint_pointer,
    out_pointer,
    words_pointer,
    scale_pointer,
    D_FF: tl.constexpr,
    BLOCK: tl.constexpr,  # covers D_FF
):
    """One row a program."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    inside = columns < D_FF
    gate = tl.load(joint_pointer + row * 2 * D_FF + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(joint_pointer + row * 2 * D_FF + D_FF + columns, mask=inside, other=0.0).to(tl.float32)
    out = (gate * tl.sigmoid(gate) * up).to(out_pointer.dtype.element_ty)
    tl.store(out_pointer + row * D_FF + columns, out, mask=inside)
    wide = out.to(tl.float32)
    scale = scale_of_rows(tl.max(tl.abs(wide), 1))
    words = tl.arange(0, BLOCK // 4)[None, :]
    packed = pack(wide * tl.div_rn(1.0, scale)[:, None], 1, BLOCK)
    tl.store(words_pointer + row * (D_FF // 4) + words, packed, mask=words < D_FF // 4)
    tl.store(scale_pointer + row + tl.arange(0, 1), scale)


@triton.jit
def swiglu_gradient_cast_kernel(
    joint_pointer,
    grad_pointer,
    grad_joint_pointer,  # perhaps the joint's
    words_pointer,
    scale_pointer,
    D_FF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    inside = columns < D_FF
    gate_at = row * 2 * D_FF + columns
    gate = tl.load(joint_pointer + gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(joint_pointer + gate_at + D_FF, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_pointer + row * D_FF + columns, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    kind: tl.constexpr = grad_joint_pointer.dtype.element_ty
    grad_gate = (grad * up * s * (1 + gate * (1 - s))).to(kind)
    grad_up = (grad * gate * s).to(kind)
    tl.store(grad_joint_pointer + gate_at, grad_gate, mask=inside)
    tl.store(grad_joint_pointer + gate_at + D_FF, grad_up, mask=inside)
    wide_gate, wide_up = grad_gate.to(tl.float32), grad_up.to(tl.float32)
    scale = scale_of_rows(tl.max(tl.maximum(tl.abs(wide_gate), tl.abs(wide_up)), 1))
    inverse = tl.div_rn(1.0, scale)[:, None]
    words = tl.arange(0, BLOCK // 4)[None, :]
    place = words_pointer + row * (D_FF // 2) + words
    tl.store(place, pack(wide_gate * inverse, 1, BLOCK), mask=words < D_FF // 4)
    tl.store(place + D_FF // 4, pack(wide_up * inverse, 1, BLOCK), mask=words < D_FF // 4)
    tl.store(scale_pointer + row + tl.arange(0, 1), scale)


def _prepare(kernel: Any) -> Any:
    def prepare(tensors: tuple[Tensor, ...], options: tuple) -> Start:
        rows, width = tensors[0].shape
        block = triton.next_power_of_2(width // 2)
        constants = {"D_FF": width // 2, "BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}
        return prepare_launch(kernel, (rows, 1), tensors, (), constants)

    return prepare


forward_calls = LaunchCache(_prepare(swiglu_cast_kernel))
backward_calls = LaunchCache(_prepare(swiglu_gradient_cast_kernel))


def forward(joint: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result for joint (rows, 2 d_ff), its cast and the scales."""
    rows, width = joint.shape
    out = joint.new_empty(rows, width // 2)
    cast, places = make_room(out)
    forward_calls((joint,), (out, *places), ())
    return out, *cast


def backward(joint: Tensor, grad: Tensor, grad_joint: Tensor) -> tuple[Tensor, Tensor]:
    """Write the gradient of joint (rows, 2 d_ff) into grad_joint; return its cast and the scales."""
    cast, places = make_room(joint)
    backward_calls((joint, grad), (grad_joint, *places), ())
    return cast


class SwiGLUAndCast(torch.autograd.Function):
    """`apply(joint)` returns (result, an empty tensor, the result's cast, its scales); see `swiglu.SwiGLU`."""

    @staticmethod
    def forward(ctx: Any, joint: Tensor) -> tuple[Tensor, ...]:
        ctx.in_place = not joint.is_leaf
        joint = joint.contiguous()
        empty = joint.new_empty(0)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(joint, empty)
        out, low, scale = forward(joint.flatten(0, -2))
        ctx.mark_non_differentiable(low, scale)
        return out.view(*joint.shape[:-1], -1), empty, low, scale

    @staticmethod
    @differentiable_once("swiglu", instead="silu(gate) * up in PyTorch's operations has a second derivative")
    def backward(ctx: Any, saved: Any, grad: Tensor, *_: None) -> tuple[Tensor]:
        joint = saved[0].detach()
        grad_joint = joint if ctx.in_place else torch.empty_like(joint)
        rows = joint.flatten(0, -2)
        cast = backward(rows, grad.contiguous().flatten(0, -2), grad_joint.view(rows.shape))
        if ctx.in_place:
            torch.autograd.graph.increment_version(joint)  # others that saved it find out
        keep_cast(grad_joint, cast)
        return (grad_joint,)
