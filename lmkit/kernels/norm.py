"""RMSNorm: of the sum of the residual stream and a layer's output, and of heads; in one pass over memory.

    h = x + delta        y = h r gain        r = 1 / sqrt(mean(h^2) + eps)

(RMSNorm: Zhang and Sennrich 2019, eq. 4.) `add_rms_norm` returns h, to which the next layer adds, and y, which this
layer reads. So the backward pass gets two gradients: dy, through the norm, and dh, past it. With u = h r:

    dx = ddelta = dh + r (g - u mean(g u)),   g = dy gain        dgain = sum over rows of dy u

Statistics are float32. Each program adds up the gain's gradient over its rows. The sums of the programs are added in
any order, or, if algorithms have to be deterministic, in one that gives the same bits on every run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmkit.core.autograd import differentiable_once
from lmkit.kernels.launch import (
    Launch,
    LaunchCache,
    Start,
    as_rows,
    calls_of,
    count_sms,
    count_tiles,
    prepare_call,
    prepare_launch,
)
from lmkit.kernels.operators import save_once


def add_rms_norm(
    x: Tensor, delta: Tensor, gain: Tensor, *, eps: float = 1e-5, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Return (x + delta, its RMSNorm times gain). Differentiable once in x, delta and gain.

    x: (..., d_model), the residual stream; the sum has its dtype. delta: shaped as x, any float dtype. gain:
    (d_model). eps: added to the mean square. dtype: of the norm; None takes x's.
    """
    normed, total = AddRMSNorm.apply(x, delta, gain, (eps, dtype or x.dtype))
    return total, normed


def rms_norm(x: Tensor, gain: Tensor, *, eps: float = 1e-5, dtype: torch.dtype | None = None) -> Tensor:
    """Return the RMSNorm of x alone, times gain. See `add_rms_norm`."""
    return AddRMSNorm.apply(x, None, gain, (eps, dtype or x.dtype))[0]


@triton.jit
def add_norm_kernel(
    x_pointer, delta_pointer, gain_pointer, total_pointer, normed_pointer, inverse_rms_pointer,
    x_stride, delta_stride, width, eps,
    ADD: tl.constexpr,  # there is a delta, and the sum is stored
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    h = tl.load(x_pointer + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        h += tl.load(delta_pointer + row * delta_stride + columns, mask=inside, other=0.0).to(tl.float32)
        h = h.to(total_pointer.dtype.element_ty)  # the norm sees what backward will read
        tl.store(total_pointer + row * width + columns, h, mask=inside)
        h = h.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(h * h) / width + eps)
    gain = tl.load(gain_pointer + columns, mask=inside, other=0.0).to(tl.float32)
    normed = h * inverse_rms * gain
    tl.store(normed_pointer + row * width + columns, normed.to(normed_pointer.dtype.element_ty), mask=inside)
    tl.store(inverse_rms_pointer + row, inverse_rms)


@triton.jit
def norm_gradient_kernel(
    grad_pointer, past_pointer,  # of the norm; of the sum
    total_pointer, gain_pointer, inverse_rms_pointer, grad_x_pointer,
    grad_gain_pointer,  # (width), or (programs, width): the sums of each program
    grad_stride, past_stride, total_stride, rows, width,
    PAST: tl.constexpr,  # the sum has a gradient
    ATOMIC: tl.constexpr,  # the gain's gradient is added up here, in any order
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A program takes every num_programs-th row."""
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    gain = tl.load(gain_pointer + columns, mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(row, tl.int64)
        grad = tl.load(grad_pointer + row * grad_stride + columns, mask=inside, other=0.0).to(tl.float32)
        unit = tl.load(total_pointer + row * total_stride + columns, mask=inside, other=0.0).to(tl.float32)
        inverse_rms = tl.load(inverse_rms_pointer + row)
        if PAST:
            past = tl.load(past_pointer + row * past_stride + columns, mask=inside, other=0.0)
        unit *= inverse_rms
        sums += grad * unit
        grad *= gain
        grad = (grad - unit * (tl.sum(grad * unit) / width)) * inverse_rms
        if PAST:
            grad += past.to(tl.float32)
        tl.store(
            grad_x_pointer + row * width + columns, grad.to(grad_x_pointer.dtype.element_ty), mask=inside
        )
    if ATOMIC:
        tl.atomic_add(grad_gain_pointer + columns, sums, mask=inside, sem="relaxed")
    else:
        tl.store(grad_gain_pointer + tl.program_id(0) * width + columns, sums, mask=inside)


def block_constants(width: int) -> dict[str, int]:
    """Return a row's block and its warps: at most 16 elements a thread from 4 warps on."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": 1 if block <= 512 else min(max(4, block // 512), 16)}


def _forward_launch(options: tuple, x: Tensor, delta: Tensor, *_: Tensor) -> Launch:
    eps, add, _dtype = options
    numbers = (x.stride(0), delta.stride(0), x.shape[1], eps)
    return (len(x), 1), numbers, {"ADD": add, **block_constants(x.shape[1])}


def _backward_launch(options: tuple, grad: Tensor, past: Tensor, total: Tensor, *_: Tensor) -> Launch:
    with_past, programs, atomic = options
    rows, width = grad.shape
    numbers = (grad.stride(0), past.stride(0), total.stride(0), rows, width)
    return (programs, 1), numbers, {"PAST": with_past, "ATOMIC": atomic, **block_constants(width)}


forward_calls = calls_of(add_norm_kernel, _forward_launch)
backward_calls = calls_of(norm_gradient_kernel, _backward_launch)


class AddRMSNorm(torch.autograd.Function):
    """`apply(x, delta, gain, (eps, dtype))` returns (norm, sum). Without delta the sum is empty, because it is x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, gain: Tensor, options: tuple[float, torch.dtype]
    ) -> tuple[Tensor, Tensor]:
        eps, dtype = options
        rows = as_rows(x)
        total = x.new_empty(x.shape if delta is not None else 0)
        normed = x.new_empty(x.shape, dtype=dtype)
        inverse_rms = x.new_empty(len(rows), dtype=torch.float32)
        if len(rows):
            inputs = (rows, rows if delta is None else as_rows(delta), gain.contiguous())
            forward_calls(inputs, (total, normed, inverse_rms), (eps, delta is not None, dtype))
        ctx.set_materialize_grads(False)  # the sum often has no gradient
        ctx.save_for_backward(x if delta is None else None, total, gain, inverse_rms)
        ctx.delta_dtype = None if delta is None else delta.dtype
        return normed, total

    @staticmethod
    @differentiable_once("RMSNorm", instead="torch.nn.functional.rms_norm has a second derivative")
    def backward(ctx: Any, saved: Any, grad: Tensor | None, past: Tensor | None) -> tuple[Tensor | None, ...]:
        x, total, *others = saved
        grad_x, grad_gain = past, None
        if grad is not None:
            grad_x, grad_gain = _gradients(grad, past, total if x is None else x, *others)
        if grad_x is None or ctx.delta_dtype is None:
            return grad_x, None, grad_gain, None
        return grad_x, grad_x.to(ctx.delta_dtype), grad_gain, None


def _gradients(
    grad: Tensor, past: Tensor | None, total: Tensor, gain: Tensor, inverse_rms: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x (which is delta's too) and of gain, in their dtypes, from those of the norm and of
    the sum (None: it has none)."""
    grad, rows = as_rows(grad), as_rows(total)
    count, width = rows.shape
    per_sm = 8 if width <= 1024 else 4  # too few programs cannot keep the memory busy
    programs = min(count, per_sm * (count_sms(grad.device) if grad.is_cuda else 1))
    grad_x = grad.new_empty(total.shape, dtype=total.dtype)
    atomic = not torch.are_deterministic_algorithms_enabled()
    make = grad.new_zeros if atomic else grad.new_empty
    sums = make((width,) if atomic else (programs, width), dtype=torch.float32)
    if count:
        inputs = (grad, grad if past is None else as_rows(past), rows, gain.contiguous(), inverse_rms)
        backward_calls(inputs, (grad_x, sums), (past is not None, programs, atomic))
    return grad_x, (sums if atomic else sums.sum(dim=0)).to(gain.dtype)


# The norm of every query and key in the joined projection q|k|v (Henry et al. 2020, "Query-Key Normalization for
# Transformers"; as in Qwen3):
#
#     q' = q gain_q / sqrt(mean(q^2) + eps)        k' likewise, with its own gain
#
# v is copied. A decode step adds the bias of the projection in the same pass. The gains' gradients are reproducible.


def heads_norm(qkv: Tensor, q_gain: Tensor, k_gain: Tensor, kv_heads: int, *, eps: float = 1e-5) -> Tensor:
    """Return q|k|v with normalised queries and keys, a new tensor. Differentiable once in qkv and the gains.

    qkv: (..., (heads + 2 kv_heads) * head_dim); q_gain, k_gain: (head_dim); eps: added to the mean square.
    """
    return HeadsNorm.apply(qkv, q_gain, k_gain, kv_heads, eps)[0]


@triton.jit
def heads_norm_kernel(
    x_pointer, q_gain_pointer, k_gain_pointer,
    bias_pointer,  # ((heads + 2 kv_heads) * head_dim)
    out_pointer,  # perhaps x
    count,  # heads of all tokens
    eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program takes the next ROWS heads."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = columns < HEAD_DIM
    head = (row % (HEADS + 2 * KV_HEADS)).to(tl.int32)
    at = row[:, None] * HEAD_DIM + columns
    mask = (row < count)[:, None] & inside
    x = tl.load(x_pointer + at, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        x += tl.load(bias_pointer + head[:, None] * HEAD_DIM + columns, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        q_gain = tl.load(q_gain_pointer + columns, mask=inside, other=0.0).to(tl.float32)
        k_gain = tl.load(k_gain_pointer + columns, mask=inside, other=0.0).to(tl.float32)
        inverse_rms = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)
        gain = tl.where((head < HEADS)[:, None], q_gain, k_gain)
        x = tl.where((head < HEADS + KV_HEADS)[:, None], x * inverse_rms[:, None] * gain, x)
    tl.store(out_pointer + at, x.to(out_pointer.dtype.element_ty), mask=mask)


@triton.jit
def heads_norm_gradient_kernel(
    grad_pointer, x_pointer, q_gain_pointer, k_gain_pointer, grad_x_pointer,
    sums_pointer,  # (programs, 2, HEAD_DIM): the gains' gradients
    count, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program takes every num_programs-th group of ROWS heads."""
    columns = tl.arange(0, BLOCK)
    inside = columns < HEAD_DIM
    q_gain = tl.load(q_gain_pointer + columns, mask=inside, other=0.0).to(tl.float32)
    k_gain = tl.load(k_gain_pointer + columns, mask=inside, other=0.0).to(tl.float32)
    q_sums = tl.zeros((ROWS, BLOCK), tl.float32)
    k_sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for group in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        row = tl.cast(group, tl.int64) * ROWS + tl.arange(0, ROWS)
        head = (row % (HEADS + 2 * KV_HEADS)).to(tl.int32)
        at = row[:, None] * HEAD_DIM + columns
        mask = (row < count)[:, None] & inside
        is_q, is_v = (head < HEADS)[:, None], (head >= HEADS + KV_HEADS)[:, None]
        grad = tl.load(grad_pointer + at, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_pointer + at, mask=mask & ~is_v, other=0.0).to(tl.float32)
        inverse_rms = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
        unit = x * inverse_rms  # 0 in v
        q_sums += tl.where(is_q, grad * unit, 0.0)
        k_sums += tl.where(is_q, 0.0, grad * unit)
        scaled = grad * tl.where(is_q, q_gain, k_gain)
        mean = tl.sum(scaled * unit, axis=1)[:, None] / HEAD_DIM
        grad_x = tl.where(is_v, grad, (scaled - unit * mean) * inverse_rms)
        tl.store(grad_x_pointer + at, grad_x.to(grad_x_pointer.dtype.element_ty), mask=mask)
    sums = sums_pointer + tl.program_id(0) * 2 * HEAD_DIM + columns
    tl.store(sums, tl.sum(q_sums, axis=0), mask=inside)
    tl.store(sums + HEAD_DIM, tl.sum(k_sums, axis=0), mask=inside)


def _heads_constants(width: int, head_dim: int, kv_heads: int) -> dict[str, int]:
    """Return the heads and the tile of a program: 1024 elements or one head, 8 elements a thread."""
    block = triton.next_power_of_2(head_dim)
    heads = {"HEADS": width // head_dim - 2 * kv_heads, "KV_HEADS": kv_heads, "HEAD_DIM": head_dim}
    return {**heads, "ROWS": max(1, 1024 // block), "BLOCK": block, "num_warps": 4}


def _heads_launch(
    qkv: Tensor, gains: tuple[Tensor, Tensor] | None, bias: Tensor | None, out: Tensor,
    *, head_dim: int, kv_heads: int, eps: float,
) -> tuple[Any, tuple[int, int], tuple[Tensor, ...], tuple, dict[str, Any]]:  # fmt: skip
    tensors = (qkv, *(gains or (qkv, qkv)), qkv if bias is None else bias, out)
    constants = _heads_constants(qkv.shape[-1], head_dim, kv_heads)
    constants |= {"NORM": gains is not None, "BIAS": bias is not None}
    count = qkv.numel() // head_dim
    return heads_norm_kernel, (count_tiles(count, constants["ROWS"]), 1), tensors, (count, eps), constants


def prepare_heads_norm(
    qkv: Tensor, gains: tuple[Tensor, Tensor] | None, bias: Tensor | None, **sizes: Any
) -> Callable[[], None]:
    """Prepare the launch that adds the bias, if there is one, and normalises queries and keys, if there are gains, in
    place: qkv (tokens, (heads + 2 kv_heads) * head_dim), contiguous. `sizes`: head_dim, kv_heads, eps."""
    return prepare_call(*_heads_launch(qkv, gains, bias, qkv, **sizes))


def _prepare_heads_forward(tensors: tuple[Tensor, ...], options: tuple) -> Start:
    qkv, q_gain, k_gain, out = tensors
    kv_heads, eps = options
    sizes = {"head_dim": len(q_gain), "kv_heads": kv_heads, "eps": eps}
    start = prepare_launch(*_heads_launch(qkv, (q_gain, k_gain), None, out, **sizes))
    return lambda qkv, q_gain, k_gain, out: start(qkv, q_gain, k_gain, qkv, out)


def _heads_backward_launch(options: tuple, _: Tensor, qkv: Tensor, q_gain: Tensor, *others: Tensor) -> Launch:
    kv_heads, eps = options
    numbers = (qkv.numel() // len(q_gain), eps)
    return (len(others[-1]), 1), numbers, _heads_constants(qkv.shape[-1], len(q_gain), kv_heads)


heads_forward_calls = LaunchCache(_prepare_heads_forward)
heads_backward_calls = calls_of(heads_norm_gradient_kernel, _heads_backward_launch)


class HeadsNorm(torch.autograd.Function):
    """`apply(qkv, q_gain, k_gain, kv_heads, eps)` returns (normalised, empty); RoPE may overwrite the first."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, q_gain: Tensor, k_gain: Tensor, kv_heads: int, eps: float
    ) -> tuple[Tensor, Tensor]:
        inputs = qkv.contiguous(), q_gain.contiguous(), k_gain.contiguous()
        out = torch.empty_like(inputs[0])
        if qkv.numel():
            heads_forward_calls(inputs, (out,), (kv_heads, eps))
        ctx.options = kv_heads, eps
        return out, save_once(ctx, out, *inputs)

    @staticmethod
    @differentiable_once("the norm of heads", instead='model.operations = "plain" has second derivatives')
    def backward(ctx: Any, saved: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        qkv, q_gain, k_gain, _ = saved
        grad_x = torch.empty_like(qkv)
        groups = -(-qkv.numel() // 1024)
        programs = min(groups, 8 * count_sms(grad.device) if grad.is_cuda else 2)
        sums = grad.new_empty((programs, 2, len(q_gain)), dtype=torch.float32)
        if qkv.numel():
            heads_backward_calls((grad.contiguous(), qkv, q_gain, k_gain), (grad_x, sums), ctx.options)
        grad_q, grad_k = sums.sum(dim=0)
        return grad_x, grad_q.to(q_gain.dtype), grad_k.to(k_gain.dtype), None, None
