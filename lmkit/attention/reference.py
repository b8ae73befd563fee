"""Naive attention: the formula, step by step. Holds all scores in memory."""

import math

from torch import Tensor

from lmkit.attention.inputs import prepare_inputs, visible_keys
from lmkit.measure.ranges import range_
from lmkit.registry import ATTENTION


@ATTENTION.register(
    "reference",
    order=1,
    aliases=("scaled_dot_prod_attention",),
    masks=True,
    windows=True,
    second_derivatives=True,
    keeps_scores=True,
)
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

    Memory grows with num_queries * num_keys. See `lmkit.attention` for shapes and conventions.
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
