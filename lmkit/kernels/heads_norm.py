"""RMSNorm of every query and key in the joined projection q|k|v, in one pass over memory.

    q' = q gain_q / sqrt(mean(q^2) + eps)        k' likewise, with its own gain

(Henry et al. 2020, "Query-Key Normalization for Transformers"; as in Qwen3.) v is copied. A decode step adds the bias
of the projection in the same pass. Statistics are float32; the gains' gradients are the same bits on every run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmkit.core.autograd import differentiable_once
from lmkit.kernels.launch import LaunchCache, Start, count_sms, prepare_launch


def heads_norm(qkv: Tensor, q_gain: Tensor, k_gain: Tensor, kv_heads: int, *, eps: float = 1e-5) -> Tensor:
    """Return q|k|v with normalised queries and keys, a new tensor. Differentiable once in qkv and the gains.

    Args:
        qkv: (..., (heads + 2 kv_heads) * head_dim)
        q_gain, k_gain: (head_dim)
        eps: added to the mean square.
    """
    return HeadsNorm.apply(qkv, q_gain, k_gain, kv_heads, eps)[0]


@triton.jit
def heads_norm_kernel(
    x_pointer,
    q_gain_pointer,
    k_gain_pointer,
    bias_pointer,  # ((heads + 2 kv_heads) * head_dim)
    out_pointer,  # perhaps x
    count,  # heads of all tokens
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
    grad_pointer,
    x_pointer,
    q_gain_pointer,
    k_gain_pointer,
    grad_x_pointer,
    sums_pointer,  # (programs, 2, HEAD_DIM): the gains' gradients
    count,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
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


def _constants(width: int, head_dim: int, kv_heads: int) -> dict[str, int]:
    """Return the heads and the tile of a program: 1024 elements or one head, 8 elements a thread."""
    block = triton.next_power_of_2(head_dim)
    rows = max(1, 1024 // block)
    heads = {"HEADS": width // head_dim - 2 * kv_heads, "KV_HEADS": kv_heads, "HEAD_DIM": head_dim}
    return {**heads, "ROWS": rows, "BLOCK": block, "num_warps": 4}


def prepare_heads_norm(
    qkv: Tensor,
    gains: tuple[Tensor, Tensor] | None,
    bias: Tensor | None,
    out: Tensor,
    *,
    head_dim: int,
    kv_heads: int,
    eps: float,
) -> tuple[Start, list[int]]:
    """Prepare the launch that adds the bias, if there is one, and normalises queries and keys, if there are gains.

    Args:
        qkv, out: (tokens, (heads + 2 kv_heads) * head_dim), contiguous; may be the same tensor.

    Returns:
        What launches, and the pointers to launch it on.
    """
    q_gain, k_gain = (qkv, qkv) if gains is None else gains
    tensors = (qkv, q_gain, k_gain, qkv if bias is None else bias, out)
    constants = _constants(qkv.shape[-1], head_dim, kv_heads)
    constants |= {"NORM": gains is not None, "BIAS": bias is not None}
    count = qkv.numel() // head_dim
    grid = (triton.cdiv(count, constants["ROWS"]), 1)
    start = prepare_launch(heads_norm_kernel, grid, tensors, (count, eps), constants)
    return start, [x.data_ptr() for x in tensors]


def _prepare_forward(tensors: tuple[Tensor, ...], options: tuple) -> Start:
    qkv, q_gain, k_gain, out = tensors
    kv_heads, eps = options
    sizes = {"head_dim": len(q_gain), "kv_heads": kv_heads, "eps": eps}
    start, _ = prepare_heads_norm(qkv, (q_gain, k_gain), None, out, **sizes)
    return lambda qkv, q_gain, k_gain, out: start(qkv, q_gain, k_gain, qkv, out)


def _prepare_backward(tensors: tuple[Tensor, ...], options: tuple) -> Start:
    qkv, q_gain, sums = tensors[1], tensors[2], tensors[-1]
    kv_heads, eps = options
    numbers = (qkv.numel() // len(q_gain), eps)
    constants = _constants(qkv.shape[-1], len(q_gain), kv_heads)
    return prepare_launch(heads_norm_gradient_kernel, (len(sums), 1), tensors, numbers, constants)


forward_calls = LaunchCache(_prepare_forward)
backward_calls = LaunchCache(_prepare_backward)


class HeadsNorm(torch.autograd.Function):
    """`apply(qkv, q_gain, k_gain, kv_heads, eps)` returns (normalised, empty); RoPE may overwrite the first."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, q_gain: Tensor, k_gain: Tensor, kv_heads: int, eps: float
    ) -> tuple[Tensor, Tensor]:
        inputs = qkv.contiguous(), q_gain.contiguous(), k_gain.contiguous()
        out, empty = torch.empty_like(inputs[0]), qkv.new_empty(0)
        if qkv.numel():
            forward_calls(inputs, (out,), (kv_heads, eps))
        ctx.save_for_backward(*inputs, empty)
        ctx.options = kv_heads, eps
        return out, empty

    @staticmethod
    @differentiable_once("the norm of heads", instead='model.operations = "plain" has second derivatives')
    def backward(ctx: Any, saved: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        qkv, q_gain, k_gain, _ = saved
        grad_x = torch.empty_like(qkv)
        groups = -(-qkv.numel() // 1024)
        programs = min(groups, 8 * count_sms(grad.device) if grad.is_cuda else 2)
        sums = grad.new_empty((programs, 2, len(q_gain)), dtype=torch.float32)
        if qkv.numel():
            backward_calls((grad.contiguous(), qkv, q_gain, k_gain), (grad_x, sums), ctx.options)
        grad_q, grad_k = sums.sum(dim=0)
        return grad_x, grad_q.to(q_gain.dtype), grad_k.to(k_gain.dtype), None, None
