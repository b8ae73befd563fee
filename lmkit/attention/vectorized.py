"""Batched PyTorch attention: three operations over all heads, no repeated keys, easy for torch.compile to fuse."""

import math

import torch
from torch import Tensor

from lmkit.core.attention import prepare_inputs, visible_keys
from lmkit.core.ranges import range_
from lmkit.registry import ATTENTION


@ATTENTION.register(
    "vectorized", order=2, aliases=("vectorized_torch",), masks=True, windows=True, keeps_scores=True
)
def vectorized(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    mask: Tensor | None = None,
    first: Tensor | None = None,
) -> Tensor:
    """Compute attention as batched matrix products; the heads of a group share their keys without a copy.

    Memory grows with num_queries * num_keys. See `lmkit.attention` for shapes and conventions.
    """
    q, k, v, scale = prepare_inputs(q, k, v, scale)
    batch, heads, num_queries, head_dim = q.shape
    kv_heads, num_keys = k.shape[1:3]
    group = heads // kv_heads if kv_heads else 1

    # The heads of a group become further rows of one matrix: one product per key head.
    rows = q.reshape(batch * kv_heads, group * num_queries, head_dim)
    keys = k.reshape(batch * kv_heads, num_keys, head_dim)
    with range_("attention.scores"):
        # (batch * kv_heads, group * num_queries, num_keys); scaled while they are written
        scores = torch.baddbmm(q.new_zeros(()), rows, keys.mT, beta=0, alpha=scale or 1.0)
        if scale == 0:  # with alpha = 0, PyTorch on CPUs with 16-bit products writes nothing
            scores = scores * scale
        scores = scores.view(batch, kv_heads, group * num_queries, num_keys)
        visible = visible_keys(q, k, causal, mask, first)
        if visible is not None:
            # Where a weight is zero, so is the gradient that softmax passes on. The filling needs a backward pass
            # only if a row may see no key, as softmax of -inf alone is NaN.
            with torch.set_grad_enabled(mask is not None and torch.is_grad_enabled()):
                scores.view(batch, heads, num_queries, num_keys).masked_fill_(~visible, -math.inf)
    with range_("attention.softmax"):
        weights = scores.softmax(dim=-1).to(v.dtype)  # (batch, kv_heads, group * num_queries, num_keys)
        if mask is not None and visible is not None:
            # A row that sees no key: softmax of -inf alone is NaN.
            by_head = weights.view(batch, heads, num_queries, num_keys)
            weights = by_head.masked_fill(~visible.any(dim=-1, keepdim=True), 0.0).view(scores.shape)
    with range_("attention.values"):
        out = torch.matmul(weights, v)  # (batch, kv_heads, group * num_queries, head_dim)
    return out.reshape(batch, heads, num_queries, head_dim)
