"""The naive attention: the formula, word for word. It materialises the scores."""

import math

from torch import Tensor

from lmkit.attention.inputs import causal_mask, prepare_inputs
from lmkit.measure.ranges import range_
from lmkit.registry import ATTENTION


@ATTENTION.register(
    "reference", order=1, aliases=("scaled_dot_prod_attention",), second_derivatives=True, keeps_scores=True
)
def reference(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None) -> Tensor:
    """softmax(q k^T * scale) v, as in "Attention Is All You Need", eq. 1.

    Memory grows with num_queries * num_keys. See `lmkit.attention` for shapes and conventions.
    """
    q, k, v, scale = prepare_inputs(q, k, v, scale)
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    k = k.repeat_interleave(group, dim=1)  # (batch, heads, num_keys, head_dim)
    v = v.repeat_interleave(group, dim=1)  # (batch, heads, num_keys, head_dim)

    with range_("attention.scores"):
        scores = q @ k.transpose(-2, -1) * scale  # (batch, heads, num_queries, num_keys)
        if causal:
            visible = causal_mask(q.shape[2], k.shape[2], q.device)
            scores = scores.masked_fill(~visible, -math.inf)
    with range_("attention.softmax"):
        weights = scores.softmax(dim=-1).to(v.dtype)  # (batch, heads, num_queries, num_keys)
    with range_("attention.values"):
        return weights @ v  # (batch, heads, num_queries, head_dim)
