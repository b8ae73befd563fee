"""SwiGLU's activation, silu(gate) * up, on the joined projection gate|up (Shazeer 2020, eq. 6).

With s = sigmoid(gate):

    y = gate s up        dgate = dy up s (1 + gate (1 - s))        dup = dy gate s

Reads both halves once and writes y; the backward pass writes the gradients where the halves were.

Between two fp8 products, what the next product reads (y, and in the backward pass the gradient of gate|up) is written
in 16 bits, as the product of the weight's gradient wants it, and in fp8 with a scale for each row: it is not read
again for the cast. The bits are those of `cast_rows` on the result.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmkit.core.autograd import differentiable_once
from lmkit.kernels.fp8 import keep_cast, make_room, pack, scale_of_rows
from lmkit.kernels.launch import Launch, calls_of, count_tiles
from lmkit.kernels.operators import save_once

BLOCK = 1024  # elements of the result a program
WARPS = 4


def swiglu(joint: Tensor) -> Tensor:
    """Return silu(gate) * up: (..., 2 d_ff), gate before up, -> (..., d_ff). Differentiable once.

    The backward pass overwrites `joint` with its gradient, unless `joint` is a leaf. So it runs once: autograd
    refuses a second pass through a retained graph, and the backward pass of any other function that saved `joint`.
    """
    return SwiGLU.apply(joint, False)[0]


def swiglu_and_cast(joint: Tensor) -> Tensor:
    """Return the same, with its cast kept beside it; so is that of the gradient of `joint`. d_ff is a multiple of
    16."""
    out, _, low, scale = SwiGLU.apply(joint, True)
    keep_cast(out, (low, scale))
    return out


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
    joint_pointer, grad_pointer,
    grad_joint_pointer,  # perhaps the joint's
    total, D_FF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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


@triton.jit
def swiglu_cast_kernel(
    joint_pointer, out_pointer, words_pointer, scale_pointer,
    D_FF: tl.constexpr, BLOCK: tl.constexpr,  # covers D_FF
):  # fmt: skip
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
    joint_pointer, grad_pointer,
    grad_joint_pointer,  # perhaps the joint's
    words_pointer, scale_pointer, D_FF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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


def _launch(options: tuple, joint: Tensor, *_: Tensor) -> Launch:
    total = joint.numel() // 2
    constants = {"D_FF": joint.shape[-1] // 2, "BLOCK": BLOCK, "num_warps": WARPS}
    return (count_tiles(total, BLOCK), 1), (total,), constants


def _cast_launch(options: tuple, joint: Tensor, *_: Tensor) -> Launch:
    rows, width = joint.shape
    block = triton.next_power_of_2(width // 2)
    constants = {"D_FF": width // 2, "BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}
    return (rows, 1), (), constants


forward_calls = calls_of(swiglu_kernel, _launch)
backward_calls = calls_of(swiglu_gradient_kernel, _launch)
cast_forward_calls = calls_of(swiglu_cast_kernel, _cast_launch)
cast_backward_calls = calls_of(swiglu_gradient_cast_kernel, _cast_launch)


class SwiGLU(torch.autograd.Function):
    """`apply(joint, casts)` returns (result, an empty tensor), with `casts` also the result's cast and its scales."""

    @staticmethod
    def forward(ctx: Any, joint: Tensor, casts: bool) -> tuple[Tensor, ...]:
        ctx.in_place, ctx.casts = not joint.is_leaf, casts
        joint = joint.contiguous()
        out = joint.new_empty(*joint.shape[:-1], joint.shape[-1] // 2)
        empty = save_once(ctx, out, joint)
        if not casts:
            if out.numel():
                forward_calls((joint,), (out,), ())
            return out, empty
        cast, places = make_room(out.flatten(0, -2))
        cast_forward_calls((joint.flatten(0, -2),), (out, *places), ())
        ctx.mark_non_differentiable(*cast)
        return out, empty, *cast

    @staticmethod
    @differentiable_once("swiglu", instead="silu(gate) * up in PyTorch's operations has a second derivative")
    def backward(ctx: Any, saved: Any, grad: Tensor, *_: None) -> tuple[Tensor, None]:
        joint, grad = saved[0].detach(), grad.contiguous()
        grad_joint = joint if ctx.in_place else torch.empty_like(joint)
        if ctx.casts:
            rows = joint.flatten(0, -2)
            cast, places = make_room(rows)
            cast_backward_calls((rows, grad), (grad_joint, *places), ())
            keep_cast(grad_joint, cast)
        elif grad.numel():
            backward_calls((joint, grad), (grad_joint,), ())
        if ctx.in_place:
            torch.autograd.graph.increment_version(joint)  # others that saved it find out
        return grad_joint, None
