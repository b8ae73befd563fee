"""FlashAttention-2 in plain PyTorch: the algorithm of the fast kernels, written to be read.

Tri Dao, "FlashAttention-2" (2023), algorithms 1 and 2. The scores are never held all at once: a tile of queries
visits the tiles of keys with an online softmax, and the backward pass computes each tile of probabilities again from
the saved log-sum-exp. Each tile product runs over all batches and heads together.

Inside `forward` and `backward`, the heads are grouped by their key head, `g` query heads each:
    q, out, dout  (batch, kv_heads, g, num_queries, head_dim)
    k, v          (batch, kv_heads, 1, num_keys, head_dim)
    lse, delta    (batch, kv_heads, g, num_queries), natural logarithm
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lmkit.attention.inputs import SECOND_DERIVATIVES, check_first, prepare_inputs
from lmkit.autograd import differentiable_once
from lmkit.registry import ATTENTION

QUERY_TILE = 128
KEY_TILE = 128


@ATTENTION.register("flash_torch", order=3, windows=True)
def flash_torch(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None, first: Tensor | None = None
) -> Tensor:
    """Compute exact attention in memory linear in the sequence lengths, forward and backward.

    Accumulates in float32 (float64 for float64 inputs). See `lmkit.attention` for shapes and conventions.
    """
    q, k, v, scale = prepare_inputs(q, k, v, scale)
    if first is not None:
        check_first(q, k, first, causal)
    return FlashAttention.apply(q, k, v, causal, scale, first)


class FlashAttention(torch.autograd.Function):
    """`FlashAttention.apply(q, k, v, causal=False, scale=None)`: attention with a backward pass of its own.

    Saves q, k, v, the output and the log-sum-exp of every row, (batch, heads, num_queries).

    >>> q, k, v = torch.randn(3, 2, 4, 10, 16, requires_grad=True).unbind()  # each (batch, heads, seq, head_dim)
    >>> out = FlashAttention.apply(q, k, v, True)
    >>> out.grad_fn.saved_tensors[-1].shape
    torch.Size([2, 4, 10])
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        scale: float | None = None,
        first: Tensor | None = None,
    ) -> Tensor:
        if scale is None:
            scale = q.shape[-1] ** -0.5
        with torch.autocast(q.device.type, enabled=False):
            out, lse = forward(q, k, v, causal, scale, first)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal, ctx.scale, ctx.first = causal, scale, first
        return out

    @staticmethod
    @differentiable_once("flash_torch", instead=SECOND_DERIVATIVES)  # lse is saved as a constant
    def backward(ctx: Any, saved: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dout = grads[0]
        with torch.autocast(dout.device.type, enabled=False):
            q, k, v, out, lse = saved
            dq, dk, dv = backward(dout, q, k, v, out, lse, ctx.causal, ctx.scale, ctx.first)
        return dq, dk, dv, None, None, None


def forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, first: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (out, lse): algorithm 1. With `first` (batch or 1, num_queries), query i sees no key before first[i].

    q and out are (batch, heads, num_queries, head_dim), k and v (batch, kv_heads, num_keys, head_dim),
    lse (batch, heads, num_queries).
    """
    shape = q.shape
    q = grouped(q, k)
    if not q.numel():
        return q.new_zeros(shape), q.new_zeros(shape[:-1], dtype=accumulation_dtype(q))
    k, v = k.unsqueeze(2), v.unsqueeze(2)
    out = torch.zeros_like(q)
    lse = q.new_full(q.shape[:-1], -math.inf, dtype=accumulation_dtype(q))

    for rows in tiles(q.shape[-2], QUERY_TILE):
        q_tile = q[..., rows, :].to(lse.dtype)  # (..., tile, head_dim)
        largest = lse.new_full((*q_tile.shape[:-1], 1), -math.inf)  # running maximum of the scores
        total = torch.zeros_like(largest)  # running sum of exp(score - largest)
        weighted = torch.zeros_like(q_tile)  # running sum of exp(score - largest) * v
        for columns in visible_key_tiles(rows, k.shape[-2], causal, first):
            scores = tile_scores(q_tile, k, rows, columns, causal, scale, first)  # (..., tile, key tile)
            new_largest = torch.maximum(largest, scores.amax(dim=-1, keepdim=True))
            if first is not None:  # a row that has seen no key yet: its sums stay zero
                new_largest = new_largest.clamp_min(torch.finfo(lse.dtype).min)
            p = torch.exp(scores - new_largest)  # (..., tile, key tile)
            # The sums so far are relative to the old maximum.
            shrink = torch.exp(largest - new_largest)
            total = total * shrink + p.sum(dim=-1, keepdim=True)
            weighted = weighted * shrink + p @ v[..., columns, :].to(p.dtype)
            largest = new_largest
        if k.shape[-2]:
            out[..., rows, :] = (weighted / total).to(out.dtype)
            lse[..., rows] = (largest + total.log()).squeeze(-1)
    return out.reshape(shape), lse.reshape(shape[:-1])


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv): algorithm 2.

    Shapes are those of `forward`: dout as out; dq, dk and dv as q, k and v.

    With P = exp(S - lse): dV = P^T dO; dP = dO V^T; dS = P * (dP - delta), delta = rowsum(dO * O);
    dQ = dS K * scale; dK = dS^T Q * scale.
    """
    q_shape, k_shape = q.shape, k.shape
    if not q.numel():
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    q, dout, out, lse = (grouped(x, k) for x in (q, dout, out, lse))
    k, v = k.unsqueeze(2), v.unsqueeze(2)
    dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
    dk = torch.zeros(k.shape, dtype=lse.dtype, device=q.device)
    dv = torch.zeros_like(dk)
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(dim=-1)  # (batch, kv_heads, g, num_queries)

    for rows in tiles(q.shape[-2], QUERY_TILE):
        q_tile, dout_tile = q[..., rows, :].to(lse.dtype), dout[..., rows, :].to(lse.dtype)
        for columns in visible_key_tiles(rows, k.shape[-2], causal, first):
            k_tile, v_tile = k[..., columns, :].to(lse.dtype), v[..., columns, :].to(lse.dtype)
            scores = tile_scores(q_tile, k, rows, columns, causal, scale, first)  # (..., tile, key tile)
            p = torch.exp(scores - lse[..., rows, None])
            dp = dout_tile @ v_tile.transpose(-2, -1)  # (..., tile, key tile)
            ds = p * (dp - delta[..., rows, None])  # (..., tile, key tile)
            dq[..., rows, :] += ds @ k_tile * scale
            # The heads of a group share their keys: their gradients add up.
            dk[..., columns, :] += (ds.transpose(-2, -1) @ q_tile).sum(dim=2, keepdim=True) * scale
            dv[..., columns, :] += (p.transpose(-2, -1) @ dout_tile).sum(dim=2, keepdim=True)
    dq, dk, dv = dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)
    return dq.reshape(q_shape), dk.reshape(k_shape), dv.reshape(k_shape)


def grouped(x: Tensor, k: Tensor) -> Tensor:
    """View (batch, heads, ...) as (batch, kv_heads, g, ...)."""
    kv_heads = k.shape[1]
    return x.unflatten(1, (kv_heads, x.shape[1] // max(kv_heads, 1)))


def tile_scores(
    q_tile: Tensor,
    k: Tensor,
    rows: slice,
    columns: slice,
    causal: bool,
    scale: float,
    first: Tensor | None = None,
) -> Tensor:
    """Return the masked, scaled scores of one tile, (..., tile, key tile)."""
    scores = q_tile @ k[..., columns, :].to(q_tile.dtype).transpose(-2, -1) * scale
    if causal and columns.stop - 1 > rows.start:  # the tile touches the diagonal
        i = torch.arange(rows.start, rows.stop, device=k.device)[:, None]
        j = torch.arange(columns.start, columns.stop, device=k.device)[None, :]
        scores = scores.masked_fill(j > i, -math.inf)
    if first is not None:
        j = torch.arange(columns.start, columns.stop, device=k.device)
        scores = scores.masked_fill(j < first[:, None, None, rows, None], -math.inf)
    return scores


def tiles(length: int, size: int) -> Iterator[slice]:
    """Yield consecutive slices of at most `size` that cover `length`."""
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def visible_key_tiles(
    rows: slice, num_keys: int, causal: bool, first: Tensor | None = None
) -> Iterator[slice]:
    """Yield the tiles of keys that any query of `rows` sees; a causal mask skips the others.

    On a CPU, so does `first`; elsewhere the host would wait for the device to learn it.
    """
    start = int(first[:, rows].min()) if first is not None and first.device.type == "cpu" else 0
    stop = min(num_keys, rows.stop) if causal else num_keys
    return (columns for columns in tiles(stop, KEY_TILE) if columns.stop > start)


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Return float32, or float64 for float64 (which `torch.autograd.gradcheck` needs)."""
    return torch.promote_types(x.dtype, torch.float32)
