"""Batched PyTorch attention: three operations over all heads at once, nothing repeated, friendly to torch.compile."""

import math

import torch
from torch import Tensor

from lmkit.attention.inputs import causal_mask, prepare_inputs
from lmkit.measure.ranges import range_
from lmkit.registry import ATTENTION


@ATTENTION.register(
    "vectorized", order=2, aliases=("vectorized_torch",), second_derivatives=True, keeps_scores=True
)
def vectorized(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None) -> Tensor:
    """Attention as batched matrix products; the heads of a group share their keys without a copy.

    Materialises the scores, as `reference` does. See `lmkit.attention` for shapes and conventions.
    """
    q, k, v, scale = prepare_inputs(q, k, v, scale)
    batch, heads, num_queries, head_dim = q.shape
    kv_heads, num_keys = k.shape[1:3]
    group = heads // kv_heads if kv_heads else 1

    # The group's heads become further rows of one matrix: one product per key head.
    rows = q.reshape(batch, kv_heads, group * num_queries, head_dim)
    with range_("attention.scores"):
        # (batch, kv_heads, group * num_queries, num_keys)
        scores = torch.matmul(rows, k.transpose(-2, -1)) * scale
        if causal:
            visible = causal_mask(num_queries, num_keys, q.device)
            scores = scores.unflatten(2, (group, num_queries)).masked_fill(~visible, -math.inf).flatten(2, 3)
    with range_("attention.softmax"):
        weights = scores.softmax(dim=-1).to(v.dtype)
    with range_("attention.values"):
        out = torch.matmul(weights, v)  # (batch, kv_heads, group * num_queries, head_dim)
    return out.reshape(batch, heads, num_queries, head_dim)
