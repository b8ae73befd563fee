"""Rotate the heads of q and k in the joined projection q|k|v by their positions (RoPE, Su et al. 2021), in place.

Every pair of neighbouring channels (2i, 2i + 1) of a head is turned by the angle a = p theta^(-2i / head_dim):

    even' = even cos a - odd sin a        odd' = even sin a + odd cos a

A gradient goes back by the rotation by -a. v passes by: in place, it is neither read nor written.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmkit.kernels.launch import Launch, calls_of


def rope_(qkv: Tensor, cos_sin: Tensor, kv_heads: int, *, reuse_grad: bool = False) -> Tensor:
    """Rotate q and k in place and return qkv. Differentiable in qkv.

    Args:
        qkv: (batch, seq, (heads + 2 kv_heads) * head_dim), as a linear layer returns it. Of a view, autograd
            copies the gradient. A tensor whose channels have another stride than 1 is copied.
        cos_sin: of each position and pair of channels, (seq, head_dim / 2, 2) or (batch, seq, head_dim / 2, 2),
            float32.
        kv_heads: as many heads at the end, those of v, stay as they are.
        reuse_grad: turn the gradient that arrives in place, too. Use only if nothing else reads this gradient; a sum
            hands one gradient to all its terms.
    """
    in_place = qkv.stride(-1) == 1
    return Rope.apply(qkv, cos_sin, (kv_heads, False, in_place, reuse_grad))


def rotate_(qkv: Tensor, cos_sin: Tensor, kv_heads: int, *, inverse: bool = False) -> None:
    """Rotate q and k of a (batch, seq, channels) array with stride 1 along the channels, without autograd: gradients
    that attention's backward pass has written into one array."""
    _rotate(qkv, qkv, cos_sin, kv_heads, inverse)
    torch.autograd.graph.increment_version(qkv)


@triton.jit
def rope_kernel(
    source_pointer,
    table_pointer,  # cosine and sine of each pair in turn
    out_pointer,  # perhaps the source
    source_stride_batch, source_stride_row, out_stride_batch, out_stride_row,
    table_stride_batch,  # 0: one table for all rows of the batch
    seq,
    HEAD_DIM: tl.constexpr,
    TURNED: tl.constexpr, KEPT: tl.constexpr,  # channels of q and k; channels after them to copy
    INVERSE: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr,  # cover TURNED; KEPT
):  # fmt: skip
    """One position a program."""
    batch = (tl.program_id(0) // seq).to(tl.int64)
    position = (tl.program_id(0) % seq).to(tl.int64)
    source = source_pointer + batch * source_stride_batch + position * source_stride_row
    out = out_pointer + batch * out_stride_batch + position * out_stride_row
    columns = tl.arange(0, BLOCK)
    inside = columns < TURNED
    table = table_pointer + batch * table_stride_batch + position * HEAD_DIM
    cos, sin = tl.split(tl.reshape(tl.load(table + columns % HEAD_DIM), (BLOCK // 2, 2)))
    if INVERSE:
        sin = -sin
    x = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, (BLOCK // 2, 2)))
    turned = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (BLOCK,))
    tl.store(out + columns, turned.to(out_pointer.dtype.element_ty), mask=inside)
    if KEPT > 0:
        kept = tl.arange(0, REST)
        v = tl.load(source + TURNED + kept, mask=kept < KEPT, other=0.0)
        tl.store(out + TURNED + kept, v, mask=kept < KEPT)


def _launch(options: tuple, source: Tensor, table: Tensor, out: Tensor) -> Launch:
    kv_heads, inverse, in_place = options
    batch, seq, width = source.shape
    head_dim = 2 * table.shape[-2]
    kept = kv_heads * head_dim
    turned = width - kept
    block = triton.next_power_of_2(turned)
    numbers = (*source.stride()[:2], *out.stride()[:2], table.stride(0) if table.dim() == 4 else 0, seq)
    channels = {"HEAD_DIM": head_dim, "TURNED": turned, "KEPT": 0 if in_place else kept, "INVERSE": inverse}
    warps = 1 if block <= 512 else min(max(4, block // 1024), 16)
    blocks = {"BLOCK": block, "REST": triton.next_power_of_2(kept), "num_warps": warps}
    return (batch * seq, 1), numbers, channels | blocks


calls = calls_of(rope_kernel, _launch)


def _rotate(source: Tensor, out: Tensor, cos_sin: Tensor, kv_heads: int, inverse: bool) -> None:
    """Write the rotated `source` to `out`, which may be the same tensor."""
    if source.numel():
        calls((source, cos_sin.contiguous()), (out,), (kv_heads, inverse, out is source))


class Rope(torch.autograd.Function):
    """`apply(qkv, cos_sin, (kv_heads, inverse, in_place, reuse_grad))`. The gradient is one more call of it."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos_sin: Tensor, options: tuple[int, bool, bool, bool]) -> Tensor:
        kv_heads, inverse, in_place, _ = ctx.options = options
        ctx.save_for_backward(cos_sin)
        if in_place:
            _rotate(qkv, qkv, cos_sin, kv_heads, inverse)
            ctx.mark_dirty(qkv)
            return qkv
        source = qkv if qkv.stride(-1) == 1 else qkv.contiguous()
        out = source.new_empty(source.shape)
        _rotate(source, out, cos_sin, kv_heads, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (cos_sin,) = ctx.saved_tensors
        kv_heads, inverse, _, reuse_grad = ctx.options
        if reuse_grad and not torch.is_grad_enabled() and grad.is_contiguous():
            rotate_(grad, cos_sin, kv_heads, inverse=not inverse)
            return grad, None, None
        return Rope.apply(grad, cos_sin, (kv_heads, not inverse, False, False)), None, None
