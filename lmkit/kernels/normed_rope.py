"""Normalise the heads of q and k in the joined projection q|k|v (`qk_norm`) and rotate them, in one pass over memory.

    u = x r        r = 1 / sqrt(mean(x^2) + eps)        y = R (gain u)

of each head x of head_dim channels; R turns pairs of channels as in `rope`. Queries and keys have a gain each
(head_dim). v is copied. With g = gain R^-1 dy:

    dx = r (g - u mean(g u))        dgain = sum over tokens and heads of u R^-1 dy

Statistics are float32 and computed again in the backward pass, which reads the projection. The gains' gradients are
added up as in `norm`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmkit.core.autograd import differentiable_once
from lmkit.kernels.launch import LaunchCache, Start, count_sms, prepare_launch
from lmkit.kernels.operators import define

SECOND = 'model.operations = "plain" has second derivatives'
PER_SM = 8
"""Programs of the backward pass on each multiprocessor."""


def normed_rope(
    qkv: Tensor,
    gains: tuple[Tensor, Tensor],
    cos_sin: Tensor,
    kv_heads: int,
    *,
    eps: float = 1e-5,
    reuse_grad: bool = False,
) -> Tensor:
    """Return a new projection with the RMSNorm of each query and key, rotated, in its place, and v as it is.

    Differentiable once in qkv and gains.

    Args:
        qkv, cos_sin, kv_heads, reuse_grad: as of `lmkit.kernels.rope.rope_`; qkv stays as it is.
        gains: of queries and of keys, (head_dim) each.
        eps: added to the mean square.
    """
    if torch.compiler.is_compiling():
        return forward_operator(qkv, *gains, cos_sin, kv_heads, eps)
    return NormedRope.apply(qkv, *gains, cos_sin, (kv_heads, eps, reuse_grad))[0]


@triton.jit
def _turned(x, cos, sin, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Rotate the pairs of channels of x (HEADS, WIDTH)."""
    even, odd = tl.split(tl.reshape(x, (HEADS, WIDTH // 2, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (HEADS, WIDTH))


@triton.jit
def _table(pointer, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Return cosines and sines of a position, (1, WIDTH / 2) each."""
    columns = tl.arange(0, WIDTH)
    table = tl.load(pointer + columns, mask=columns < HEAD_DIM, other=0.0)
    return tl.split(tl.reshape(table, (1, WIDTH // 2, 2)))


@triton.jit
def normed_rope_kernel(
    source_pointer,
    q_gain_pointer,
    k_gain_pointer,
    table_pointer,  # cosine and sine of each pair in turn
    out_pointer,
    source_stride_batch,
    source_stride_row,
    table_stride_batch,  # 0: one table for all rows of the batch
    seq,
    eps,
    HEAD_DIM: tl.constexpr,
    Q_HEADS: tl.constexpr,
    TURNED_HEADS: tl.constexpr,  # of q and k
    KEPT: tl.constexpr,  # channels after them to copy
    HEADS: tl.constexpr,  # covers TURNED_HEADS
    WIDTH: tl.constexpr,  # covers HEAD_DIM
    REST: tl.constexpr,  # covers KEPT
):
    """One position a program."""
    batch = (tl.program_id(0) // seq).to(tl.int64)
    position = (tl.program_id(0) % seq).to(tl.int64)
    source = source_pointer + batch * source_stride_batch + position * source_stride_row
    out = out_pointer + tl.program_id(0).to(tl.int64) * (TURNED_HEADS * HEAD_DIM + KEPT)
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :]
    place, inside = head * HEAD_DIM + column, (head < TURNED_HEADS) & (column < HEAD_DIM)
    x = tl.load(source + place, mask=inside, other=0.0).to(tl.float32)
    kept = tl.arange(0, REST)
    v = tl.load(source + TURNED_HEADS * HEAD_DIM + kept, mask=kept < KEPT, other=0.0)
    cos, sin = _table(table_pointer + batch * table_stride_batch + position * HEAD_DIM, HEAD_DIM, WIDTH)
    q_gain = tl.load(q_gain_pointer + column, mask=column < HEAD_DIM, other=0.0).to(tl.float32)
    k_gain = tl.load(k_gain_pointer + column, mask=column < HEAD_DIM, other=0.0).to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
    x = _turned(x * inverse_rms * tl.where(head < Q_HEADS, q_gain, k_gain), cos, sin, HEADS, WIDTH)
    tl.store(out + place, x.to(out_pointer.dtype.element_ty), mask=inside)
    tl.store(out + TURNED_HEADS * HEAD_DIM + kept, v, mask=kept < KEPT)


@triton.jit
def normed_rope_gradient_kernel(
    grad_pointer,
    source_pointer,
    q_gain_pointer,
    k_gain_pointer,
    table_pointer,
    out_pointer,  # perhaps the gradient that arrived
    sums_pointer,  # (2, head_dim), or (programs, 2, head_dim): the sums of each program
    grad_stride_batch,
    grad_stride_row,
    source_stride_batch,
    source_stride_row,
    table_stride_batch,
    tokens,
    seq,
    eps,
    HEAD_DIM: tl.constexpr,
    Q_HEADS: tl.constexpr,
    TURNED_HEADS: tl.constexpr,
    KEPT: tl.constexpr,  # channels to copy; v's, if `out` is new
    V: tl.constexpr,  # channels of v
    ATOMIC: tl.constexpr,  # the gains' gradients are added up here, in any order
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
):
    """A program takes every num_programs-th token."""
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :]
    place, inside = head * HEAD_DIM + column, (head < TURNED_HEADS) & (column < HEAD_DIM)
    q_gain = tl.load(q_gain_pointer + column, mask=column < HEAD_DIM, other=0.0).to(tl.float32)
    k_gain = tl.load(k_gain_pointer + column, mask=column < HEAD_DIM, other=0.0).to(tl.float32)
    gain = tl.where(head < Q_HEADS, q_gain, k_gain)
    sums = tl.zeros((HEADS, WIDTH), tl.float32)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        batch, position = tl.cast(token // seq, tl.int64), tl.cast(token % seq, tl.int64)
        given = grad_pointer + batch * grad_stride_batch + position * grad_stride_row
        source = source_pointer + batch * source_stride_batch + position * source_stride_row
        out = out_pointer + tl.cast(token, tl.int64) * (TURNED_HEADS * HEAD_DIM + V)
        grad = tl.load(given + place, mask=inside, other=0.0).to(tl.float32)
        unit = tl.load(source + place, mask=inside, other=0.0).to(tl.float32)
        cos, sin = _table(table_pointer + batch * table_stride_batch + position * HEAD_DIM, HEAD_DIM, WIDTH)
        inverse_rms = tl.rsqrt(tl.sum(unit * unit, 1) / HEAD_DIM + eps)[:, None]
        unit *= inverse_rms
        grad = _turned(grad, cos, -sin, HEADS, WIDTH)
        sums += grad * unit
        grad *= gain
        grad = (grad - unit * (tl.sum(grad * unit, 1) / HEAD_DIM)[:, None]) * inverse_rms
        tl.store(out + place, grad.to(out_pointer.dtype.element_ty), mask=inside)
        if KEPT > 0:
            kept = tl.arange(0, REST)
            v = tl.load(given + TURNED_HEADS * HEAD_DIM + kept, mask=kept < KEPT, other=0.0)
            tl.store(out + TURNED_HEADS * HEAD_DIM + kept, v, mask=kept < KEPT)
    of_q = tl.sum(tl.where(head < Q_HEADS, sums, 0.0), 0)
    of_k = tl.sum(tl.where(head < Q_HEADS, 0.0, sums), 0)
    columns = tl.arange(0, WIDTH)
    if ATOMIC:
        tl.atomic_add(sums_pointer + columns, of_q, mask=columns < HEAD_DIM, sem="relaxed")
        tl.atomic_add(sums_pointer + HEAD_DIM + columns, of_k, mask=columns < HEAD_DIM, sem="relaxed")
    else:
        into = sums_pointer + tl.program_id(0) * 2 * HEAD_DIM + columns
        tl.store(into, of_q, mask=columns < HEAD_DIM)
        tl.store(into + HEAD_DIM, of_k, mask=columns < HEAD_DIM)


def _sizes(qkv: Tensor, head_dim: int, kv_heads: int) -> dict[str, int]:
    """Return the constants that both kernels take."""
    turned = qkv.shape[-1] // head_dim - kv_heads
    heads, width = triton.next_power_of_2(turned), triton.next_power_of_2(head_dim)
    return {
        "HEAD_DIM": head_dim,
        "Q_HEADS": turned - kv_heads,
        "TURNED_HEADS": turned,
        "HEADS": heads,
        "WIDTH": width,
        "REST": triton.next_power_of_2(kv_heads * head_dim),
        "num_warps": 1 if heads * width <= 256 else min(max(4, heads * width // 256), 16),
    }


def _prepare_forward(tensors: tuple[Tensor, ...], options: tuple) -> Start:
    qkv, q_gain, _, table, _ = tensors
    kv_heads, eps = options
    head_dim = len(q_gain)
    numbers = (*qkv.stride()[:2], table.stride(0) if table.dim() == 4 else 0, qkv.shape[1], eps)
    constants = {"KEPT": kv_heads * head_dim, **_sizes(qkv, head_dim, kv_heads)}
    return prepare_launch(normed_rope_kernel, (qkv.shape[0] * qkv.shape[1], 1), tensors, numbers, constants)


def _prepare_backward(tensors: tuple[Tensor, ...], options: tuple) -> Start:
    grad, qkv, q_gain, _, table, *_ = tensors
    kv_heads, eps, in_place, programs, atomic = options
    head_dim = len(q_gain)
    batch, seq, _ = qkv.shape
    strides = (*grad.stride()[:2], *qkv.stride()[:2], table.stride(0) if table.dim() == 4 else 0)
    constants = {
        "KEPT": 0 if in_place else kv_heads * head_dim,
        "V": kv_heads * head_dim,
        "ATOMIC": atomic,
        **_sizes(qkv, head_dim, kv_heads),
    }
    numbers = (*strides, batch * seq, seq, eps)
    return prepare_launch(normed_rope_gradient_kernel, (programs, 1), tensors, numbers, constants)


forward_calls = LaunchCache(_prepare_forward)
backward_calls = LaunchCache(_prepare_backward)


def forward(
    qkv: Tensor, q_gain: Tensor, k_gain: Tensor, cos_sin: Tensor, kv_heads: int, eps: float
) -> Tensor:
    """Return the new projection, dense."""
    qkv = qkv if qkv.stride(-1) == 1 else qkv.contiguous()
    out = qkv.new_empty(qkv.shape)
    if qkv.numel():
        inputs = (qkv, q_gain.contiguous(), k_gain.contiguous(), cos_sin.contiguous())
        forward_calls(inputs, (out,), (kv_heads, eps))
    return out


def backward(
    grad: Tensor,
    qkv: Tensor,
    q_gain: Tensor,
    k_gain: Tensor,
    cos_sin: Tensor,
    kv_heads: int,
    eps: float,
    in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the projection and of both gains, in their dtypes.

    Unless algorithms have to be deterministic, those of the gains are sums in an order that changes from run to run.

    Args:
        in_place: write that of the projection to `grad`, which is dense.
    """
    qkv, grad = (x if x.stride(-1) == 1 else x.contiguous() for x in (qkv, grad))
    out = grad if in_place else grad.new_empty(grad.shape)
    tokens = qkv.shape[0] * qkv.shape[1]
    programs = min(tokens, PER_SM * (count_sms(grad.device) if grad.is_cuda else 1))
    atomic = not torch.are_deterministic_algorithms_enabled()
    make = grad.new_zeros if atomic else grad.new_empty
    sums = make((*(() if atomic else (programs,)), 2, len(q_gain)), dtype=torch.float32)
    if grad.numel():
        inputs = (grad, qkv, q_gain.contiguous(), k_gain.contiguous(), cos_sin.contiguous())
        backward_calls(inputs, (out, sums), (kv_heads, eps, in_place, programs, atomic))
    if in_place:
        torch.autograd.graph.increment_version(grad)
    of_q, of_k = sums if atomic else sums.sum(dim=0)
    # Operators return no views.
    return out, of_q.to(q_gain.dtype, copy=True), of_k.to(k_gain.dtype, copy=True)


class NormedRope(torch.autograd.Function):
    """`apply(qkv, q_gain, k_gain, cos_sin, (kv_heads, eps, reuse_grad))` returns (projection, empty)."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        q_gain: Tensor,
        k_gain: Tensor,
        cos_sin: Tensor,
        options: tuple[int, float, bool],
    ) -> tuple[Tensor, Tensor]:
        ctx.options = options
        empty = qkv.new_empty(0)  # `differentiable_once` needs an output among the saved tensors
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(qkv, q_gain, k_gain, cos_sin, empty)
        return forward(qkv, q_gain, k_gain, cos_sin, *options[:2]), empty

    @staticmethod
    @differentiable_once("the norm of heads", instead=SECOND)
    def backward(ctx: Any, saved: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
        kv_heads, eps, reuse_grad = ctx.options
        # What requires a gradient itself may be read by those who differentiate once more.
        in_place = reuse_grad and not grad.requires_grad and grad.is_contiguous()
        qkv, q_gain, k_gain, cos_sin, _ = saved
        gradients = backward(grad, qkv, q_gain, k_gain, cos_sin, kv_heads, eps, in_place)
        return *gradients, None, None


_LIBRARY = torch.library.Library("lmkit", "FRAGMENT")
forward_operator = define(
    _LIBRARY,
    "normed_rope(Tensor qkv, Tensor q_gain, Tensor k_gain, Tensor cos_sin, int kv_heads, float eps) -> Tensor",
    forward,
    lambda qkv, *_: qkv.new_empty(qkv.shape),
)
backward_operator = define(
    _LIBRARY,
    "normed_rope_backward(Tensor grad, Tensor qkv, Tensor q_gain, Tensor k_gain, Tensor cos_sin, int kv_heads, "
    "float eps) -> (Tensor, Tensor, Tensor)",
    backward,
    lambda grad, qkv, q_gain, k_gain, *_: (
        grad.new_empty(grad.shape),
        q_gain.new_empty(q_gain.shape),
        k_gain.new_empty(k_gain.shape),
    ),
)


def _save_for_operator(ctx: Any, inputs: tuple, output: Tensor) -> None:
    *tensors, ctx.kv_heads, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _backward_of_operator(ctx: Any, grad: Tensor) -> tuple:
    return *backward_operator(grad, *ctx.saved_tensors, ctx.kv_heads, ctx.eps), None, None, None


torch.library.register_autograd(
    "lmkit::normed_rope", _backward_of_operator, setup_context=_save_for_operator, lib=_LIBRARY
)
