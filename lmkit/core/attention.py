"""Scaled dot-product attention: the formula, and FlashAttention-2 in plain PyTorch.

    reference(q, k, v, causal=..., scale=...)      softmax(q k^T * scale) v, with all scores in memory
    flash_torch(q, k, v, causal=..., scale=...)    the same tile by tile, with memory linear in the sequence lengths

q is (batch, heads, num_queries, head_dim), k and v are (batch, kv_heads, num_keys, head_dim). `heads` is a multiple
of `kv_heads`: query head h reads key head h // group. With `causal`, query i sees the keys j <= i. With `first`
(batch or 1, num_queries), too, it sees the keys first[i] <= j <= i: windows and documents hide what came before.
`first` holds indices of keys, and first[i] <= i: each query sees at least its own key.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lmkit.core.autograd import differentiable_once, is_transformed, without_autocast
from lmkit.core.ranges import range_

SECOND_DERIVATIVES = "the attention kernels reference and vectorized have second derivatives"
QUERY_TILE = 128
KEY_TILE = 128

# ---- The formula


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    mask: Tensor | None = None,
    first: Tensor | None = None,
) -> Tensor:
    """Return softmax(q k^T * scale) v ("Attention Is All You Need", eq. 1).

    Memory grows with num_queries * num_keys.

    Args:
        mask: booleans, True where a query may see a key; broadcasts to (batch, heads, num_queries, num_keys). A row
            that sees no key gives zeros.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together.
    """
    q, k, v, scale = prepare_inputs(q, k, v, scale)
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    k = k.repeat_interleave(group, dim=1)  # (batch, heads, num_keys, head_dim)
    v = v.repeat_interleave(group, dim=1)  # (batch, heads, num_keys, head_dim)

    with range_("attention.scores"):
        scores = q @ k.transpose(-2, -1) * scale  # (batch, heads, num_queries, num_keys)
        visible = visible_keys(q, k, causal, mask, first)
        if visible is not None:
            scores = scores.masked_fill(~visible, -math.inf)
    with range_("attention.softmax"):
        weights = scores.softmax(dim=-1).to(v.dtype)  # (batch, heads, num_queries, num_keys)
        if mask is not None and visible is not None:
            # A row that sees no key: softmax of -inf alone is NaN.
            weights = weights.masked_fill(~visible.any(dim=-1, keepdim=True), 0.0)
    with range_("attention.values"):
        return weights @ v  # (batch, heads, num_queries, head_dim)


# ---- FlashAttention-2 (Dao 2023, algorithms 1 and 2)
#
# The scores are never held all at once: a tile of queries visits the tiles of keys with an online softmax, and the
# backward pass computes each tile of probabilities again from the saved log-sum-exp. Each tile product runs over all
# batches and heads together. Inside `flash_forward` and
# `flash_backward`, g query heads are grouped by their key head:
#   q, out, dout  (batch, kv_heads, g, num_queries, head_dim)
#   k, v          (batch, kv_heads, 1, num_keys, head_dim)
#   lse, delta    (batch, kv_heads, g, num_queries); lse is a natural logarithm


def flash_torch(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None, first: Tensor | None = None
) -> Tensor:
    """Compute exact attention in memory linear in the sequence lengths, forward and backward.

    Accumulates in float32 (float64 for float64 inputs). Raises what `reference` raises.
    """
    if is_transformed() or torch.compiler.is_exporting():  # no length would be dynamic
        return reference(q, k, v, causal=causal, scale=scale, first=first)
    q, k, v, scale = prepare_inputs(q, k, v, scale)
    if first is not None:
        check_first(q, k, first, causal)
    return FlashAttention.apply(q, k, v, causal, scale, first)


class FlashAttention(torch.autograd.Function):
    """`FlashAttention.apply(q, k, v, causal=False, scale=None, first=None)`: attention with its own backward pass.

    q, k and v may lack the axis of heads, as (batch, seq, head_dim). Saves them, the output and the log-sum-exp of
    every row, (batch, heads, num_queries) or (batch, num_queries).

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
        with without_autocast(q.device.type):
            heads, k_heads, v_heads = (with_heads(x, q) for x in (q, k, v))
            heads, k_heads, v_heads, scale = prepare_inputs(heads, k_heads, v_heads, scale)
            out, lse = flash_forward(heads, k_heads, v_heads, causal, scale, first)
        out, lse = out.view(q.shape), lse.view(q.shape[:-1])
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal, ctx.scale, ctx.first = causal, scale, first
        return out

    @staticmethod
    @differentiable_once("flash_torch", instead=SECOND_DERIVATIVES)  # lse has no gradient
    def backward(ctx: Any, saved: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with without_autocast(grads[0].device.type):
            dout, q, k, v, out, lse = (with_heads(x, saved[0]) for x in (grads[0], *saved))
            dq, dk, dv = flash_backward(dout, q, k, v, out, lse, ctx.causal, ctx.scale, ctx.first)
        dq, dk, dv = (gradient.view(x.shape) for gradient, x in zip((dq, dk, dv), saved[:3], strict=True))
        return dq, dk, dv, None, None, None


def with_heads(x: Tensor, q: Tensor) -> Tensor:
    """Give a tensor the axis of heads that q, and so x, may lack."""
    return x.unsqueeze(1) if q.dim() == 3 else x


def flash_forward(
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

    for queries in tiles(q.shape[-2], QUERY_TILE):
        q_tile = q[..., queries, :].to(lse.dtype)  # (..., tile, head_dim)
        largest = lse.new_full((*q_tile.shape[:-1], 1), -math.inf)  # running maximum of the scores
        total = torch.zeros_like(largest)  # running sum of exp(score - largest)
        weighted = torch.zeros_like(q_tile)  # running sum of exp(score - largest) * v
        for keys in visible_key_tiles(queries, k.shape[-2], causal, first):
            scores = tile_scores(q_tile, k, queries, keys, causal, scale, first)  # (..., tile, key tile)
            new_largest = torch.maximum(largest, scores.amax(dim=-1, keepdim=True))
            # A query that has seen no key yet has largest = -inf, and -inf - (-inf) is NaN. A finite maximum keeps
            # its sums zero.
            if first is not None:
                new_largest = new_largest.clamp_min(torch.finfo(lse.dtype).min)
            p = torch.exp(scores - new_largest)  # (..., tile, key tile)
            # The sums so far are relative to the old maximum.
            shrink = torch.exp(largest - new_largest)
            total = total * shrink + p.sum(dim=-1, keepdim=True)
            weighted = weighted * shrink + p @ v[..., keys, :].to(p.dtype)
            largest = new_largest
        if k.shape[-2]:
            out[..., queries, :] = (weighted / total).to(out.dtype)
            lse[..., queries] = (largest + total.log()).squeeze(-1)
    return out.reshape(shape), lse.reshape(shape[:-1])


def flash_backward(
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
    """Return (dq, dk, dv): the formulas of algorithm 2, with queries in the outer loop and keys in the inner one.

    Shapes are those of `flash_forward`: dout as out; dq, dk and dv as q, k and v.

    With P = exp(S - lse): dV = P^T dO; dP = dO V^T; dS = P * (dP - delta), the gradient of the softmax, with
    delta = rowsum(P * dP) = rowsum(dO * O), which needs no P; dQ = dS K * scale; dK = dS^T Q * scale.
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

    for queries in tiles(q.shape[-2], QUERY_TILE):
        q_tile, dout_tile = q[..., queries, :].to(lse.dtype), dout[..., queries, :].to(lse.dtype)
        for keys in visible_key_tiles(queries, k.shape[-2], causal, first):
            k_tile, v_tile = k[..., keys, :].to(lse.dtype), v[..., keys, :].to(lse.dtype)
            scores = tile_scores(q_tile, k, queries, keys, causal, scale, first)  # (..., tile, key tile)
            p = torch.exp(scores - lse[..., queries, None])
            dp = dout_tile @ v_tile.transpose(-2, -1)  # (..., tile, key tile)
            ds = p * (dp - delta[..., queries, None])  # (..., tile, key tile)
            dq[..., queries, :] += ds @ k_tile * scale
            # The heads of a group share their keys: their gradients add up.
            dk[..., keys, :] += (ds.transpose(-2, -1) @ q_tile).sum(dim=2, keepdim=True) * scale
            dv[..., keys, :] += (p.transpose(-2, -1) @ dout_tile).sum(dim=2, keepdim=True)
    dq, dk, dv = dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)
    return dq.reshape(q_shape), dk.reshape(k_shape), dv.reshape(k_shape)


def grouped(x: Tensor, k: Tensor) -> Tensor:
    """View (batch, heads, ...) as (batch, kv_heads, g, ...)."""
    kv_heads = k.shape[1]
    return x.unflatten(1, (kv_heads, x.shape[1] // max(kv_heads, 1)))


def tile_scores(
    q_tile: Tensor,
    k: Tensor,
    queries: slice,
    keys: slice,
    causal: bool,
    scale: float,
    first: Tensor | None = None,
) -> Tensor:
    """Return the masked, scaled scores of one tile, (..., tile, key tile)."""
    scores = q_tile @ k[..., keys, :].to(q_tile.dtype).transpose(-2, -1) * scale
    if causal and keys.stop - 1 > queries.start:  # the tile touches the diagonal
        i = torch.arange(queries.start, queries.stop, device=k.device)[:, None]
        j = torch.arange(keys.start, keys.stop, device=k.device)[None, :]
        scores = scores.masked_fill(j > i, -math.inf)
    if first is not None:
        j = torch.arange(keys.start, keys.stop, device=k.device)
        scores = scores.masked_fill(j < first[:, None, None, queries, None], -math.inf)
    return scores


def tiles(length: int, size: int) -> Iterator[slice]:
    """Yield consecutive slices of at most `size` that cover `length`."""
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def visible_key_tiles(
    queries: slice, num_keys: int, causal: bool, first: Tensor | None = None
) -> Iterator[slice]:
    """Yield the tiles of keys that any query of `queries` sees.

    With `causal`, the tiles after the last query are skipped. On a CPU, so are the tiles before the smallest `first`;
    on a GPU they are not, because the host would wait for the device to read it.
    """
    start = int(first[:, queries].min()) if first is not None and first.device.type == "cpu" else 0
    stop = min(num_keys, queries.stop) if causal else num_keys
    return (keys for keys in tiles(stop, KEY_TILE) if keys.stop > start)


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Return float32, or float64 for float64 (which `torch.autograd.gradcheck` needs)."""
    return torch.promote_types(x.dtype, torch.float32)


# ---- Arguments: shapes, and which keys a query sees


def prepare_inputs(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Check the shapes, cast under autocast, and fill in the default scale.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together.
        TypeError: `scale` is a tensor.
    """
    q_shape, k_shape = q.shape, k.shape  # read once: this runs before every call
    if len(q_shape) != 4 or len(k_shape) != 4 or k_shape != v.shape:
        raise ValueError(
            "q must be (batch, heads, num_queries, head_dim), k and v (batch, kv_heads, num_keys, head_dim); "
            f"got {tuple(q_shape)}, {tuple(k_shape)} and {tuple(v.shape)}"
        )
    if q_shape[0] != k_shape[0] or q_shape[3] != k_shape[3]:
        raise ValueError(f"q {tuple(q_shape)} and k {tuple(k_shape)} differ in batch or head_dim")
    heads, kv_heads = q_shape[1], k_shape[1]
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(f"{heads} query heads are not a multiple of {kv_heads} key/value heads")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on one device, got {q.device}, {k.device} and {v.device}")
    if not q.is_floating_point():
        raise ValueError(f"q, k and v must be floating-point tensors, got {q.dtype}")
    if isinstance(scale, Tensor):
        raise TypeError("scale must be a number: it gets no gradient")
    device_type = q.device.type
    under_autocast = device_type != "meta" and torch.is_autocast_enabled(
        device_type
    )  # PyTorch refuses "meta"
    if under_autocast and torch.float64 not in (q.dtype, k.dtype, v.dtype):
        # RoPE may return float32 queries while the values are bfloat16: cast all three to one dtype.
        dtype = torch.get_autocast_dtype(device_type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must share one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    return q, k, v, q.shape[-1] ** -0.5 if scale is None else float(scale)


def visible_keys(
    q: Tensor, k: Tensor, causal: bool, mask: Tensor | None, first: Tensor | None = None
) -> Tensor | None:
    """Return booleans, True where a query sees a key: (num_queries, num_keys), or (batch, heads, num_queries,
    num_keys) with `mask` or `first`. None means that every query sees every key.

    Raises:
        ValueError: `mask` is not boolean, or does not broadcast; `first` without `causal`, or of another shape.
    """
    num_queries, num_keys = q.shape[2], k.shape[2]
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(f"mask must be boolean, got {mask.dtype}")
    if first is not None:
        check_first(q, k, first, causal)
        after = torch.arange(num_keys, device=q.device) >= first[:, None, :, None]
        mask = after if mask is None else mask & after  # (batch or 1, 1, num_queries, num_keys)
    below_diagonal = None
    if causal:
        below_diagonal = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device).tril()
    if mask is None:
        return below_diagonal
    full = (*q.shape[:2], num_queries, num_keys)
    trailing = full[len(full) - mask.dim() :]
    if mask.dim() > 4 or any(
        size not in (1, wanted) for size, wanted in zip(mask.shape, trailing, strict=True)
    ):
        raise ValueError(f"mask {tuple(mask.shape)} does not broadcast to {full}")
    return (mask if below_diagonal is None else mask & below_diagonal).expand(full)


def check_first(q: Tensor, k: Tensor, first: Tensor, causal: bool) -> None:
    """Raise ValueError unless `first` is (batch or 1, num_queries) and causal attention uses it. first[i] <= i is not
    checked: the host would wait for the device."""
    if not causal or k.shape[2] < q.shape[2]:
        raise ValueError("first= needs causal=True, and as many keys as queries")
    if first.dim() != 2 or first.shape[0] not in (1, q.shape[0]) or first.shape[1] != q.shape[2]:
        raise ValueError(f"first {tuple(first.shape)} does not fit queries {tuple(q.shape)}")


def first_in_document(begins: Tensor) -> Tensor:
    """Return the first token that each token sees if documents are separate: (batch, seq) int32.

    Args:
        begins: (batch, seq), True at the token before a document's first one, usually an end-of-text token. It is the
            first token that the document's tokens see.
    """
    places = torch.arange(begins.shape[1], device=begins.device, dtype=torch.int32)
    return torch.where(begins, places, 0).cummax(dim=1).values


def first_in_window(window: int | None, seq: int, device: torch.device) -> Tensor | None:
    """Return max(0, i - window + 1) for each token i: (1, seq) int32. A window counts the token itself."""
    if window is None:
        return None
    return (torch.arange(seq, device=device, dtype=torch.int32) - (window - 1)).clamp_min(0)[None]


def zeros_like_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the output if there are no keys, or no queries: zeros, with q, k and v part of the graph."""
    # All sums are 0: of empty slices (0 times an infinite query would be NaN), and of k and v, which have no elements
    # if the output has any.
    return torch.zeros_like(q) + (q[..., :0].sum() + k.sum() + v.sum())
