"""Attention of the heads in a joined projection q|k|v, whose gradient is one array, too: nothing is concatenated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lmkit.attention.flash_triton import (
    Options,
    backward,
    first_as_read,
    flash_triton,
    forward,
    implementation_for,
    refuse_unsupported,
    rows_in_place,
)
from lmkit.core.attention import SECOND_DERIVATIVES
from lmkit.core.autograd import differentiable_once


def flash_triton_joined(
    qkv: Tensor, *, kv_heads: int, head_dim: int, causal: bool = True, first: Tensor | None = None
) -> Tensor:
    """Compute `flash_triton` of the heads of a projection.

    Args:
        qkv: (batch, seq, (heads + 2 kv_heads) * head_dim)
        kv_heads: of k, and of v.
        first: as of `flash_triton`.

    Returns:
        (batch, seq, heads * head_dim)

    Raises:
        UsageError: this head_dim, dtype or device is not supported.
    """
    qkv = qkv if qkv.stride(-1) == 1 else qkv.contiguous()
    q, k, v = heads_of(qkv, kv_heads, head_dim)
    if torch.compiler.is_compiling() or qkv.numel() == 0:
        out = flash_triton(q, k, v, causal=causal, first=first)
    else:
        refuse_unsupported(q)
        deterministic = torch.are_deterministic_algorithms_enabled()
        precision = "bf16x6" if q.dtype == torch.float32 else "ieee"
        implementation = implementation_for(q, k, v)
        first = first_as_read(q, k, first, causal)
        options = Options(causal, head_dim**-0.5, implementation, deterministic, precision, first)
        out = JoinedAttention.apply(qkv, (kv_heads, head_dim, options))[0]
    return out.transpose(1, 2).flatten(2)


def heads_of(qkv: Tensor, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of q (batch, heads, seq, head_dim), k and v (batch, kv_heads, seq, head_dim)."""
    heads = qkv.unflatten(-1, (-1, head_dim))  # (batch, seq, heads + 2 kv_heads, head_dim)
    # Split before they are transposed: autograd concatenates the gradients as they lie in qkv.
    q, k, v = heads.split((heads.shape[2] - 2 * kv_heads, kv_heads, kv_heads), dim=2)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


class JoinedAttention(torch.autograd.Function):
    """`apply(qkv, (kv_heads, head_dim, options))` returns (out, log-sum-exp)."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, options: tuple[int, int, Options]) -> tuple[Tensor, Tensor]:
        kv_heads, head_dim, how = ctx.options = options
        out, lse = forward(*heads_of(qkv, kv_heads, head_dim), how)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # or autograd would allocate zeros as the gradient of lse
        ctx.save_for_backward(qkv, out, lse)
        return out, lse

    @staticmethod
    @differentiable_once("flash_triton_joined", instead=SECOND_DERIVATIVES)
    def backward(ctx: Any, saved: Any, *grads: Tensor) -> tuple[Tensor, None]:
        qkv, out, lse = saved
        kv_heads, head_dim, how = ctx.options
        grad = qkv.new_empty(qkv.shape)
        heads, into = heads_of(qkv, kv_heads, head_dim), heads_of(grad, kv_heads, head_dim)
        backward(rows_in_place(grads[0]), *heads, out, lse, options=how, into=into)
        return grad, None
