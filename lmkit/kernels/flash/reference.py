"""Compute attention forward and backward by the plain formulas, without tiles: the oracle of the kernels' tests.

Works in the dtype of its inputs, float64 for an oracle, and keeps the (num_queries, num_keys) scores.
"""

import math

import torch
from torch import Tensor


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, first: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return out = softmax(q k^T scale) v and lse = log(sum(exp(q k^T scale))).

    Args:
        q: (batch, heads, num_queries, head_dim); k, v: (batch, kv_heads, num_keys, head_dim), where heads is a
            multiple of kv_heads.
        causal: query i sees the keys j <= i.
        first: (batch or 1, num_queries); query i sees no key before first[i].
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT * scale  # (batch, heads, num_queries, num_keys)
    scores = scores.masked_fill(hidden_keys(scores, causal, first), -math.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, first: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of `attention_forward`'s out for dout, its gradient.

    The formulas are those of the kernels (FlashAttention-2, Dao 2023, section 3.1), with P = exp(S - lse).
    """
    group = q.shape[1] // k.shape[1]
    out, lse = attention_forward(q, k, v, causal, scale, first)
    wide_k, wide_v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    p = torch.exp(q @ wide_k.mT * scale - lse[..., None])
    p = p.masked_fill(hidden_keys(p, causal, first), 0.0)
    delta = (dout * out).sum(-1, keepdim=True)
    ds = p * (dout @ wide_v.mT - delta)
    dq, dk, dv = ds @ wide_k * scale, ds.mT @ q * scale, p.mT @ dout

    def sum_group(x: Tensor) -> Tensor:
        """Sum over the query heads that share a key head."""
        return x.unflatten(1, (-1, group)).sum(2)

    return dq, sum_group(dk), sum_group(dv)


def hidden_keys(scores: Tensor, causal: bool, first: Tensor | None) -> Tensor:
    """Return booleans that broadcast to `scores`, True where a query must not see a key."""
    hidden = torch.zeros(scores.shape[-2:], device=scores.device, dtype=torch.bool)
    if causal:
        hidden = torch.ones_like(hidden).triu(1)
    if first is not None:
        keys = torch.arange(scores.shape[-1], device=scores.device)
        hidden = hidden | (keys < first[:, None, :, None])
    return hidden
