"""The plain formulas against PyTorch's attention and autograd, in float64."""

import pytest
import torch

from lmkit.kernels.flash.reference import attention_backward, attention_forward


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (5, 9), (9, 5)])
def test_formulas_equal_pytorch(queries, keys, causal, random_inputs):
    q, k, v, dout = random_inputs(
        batch=2, heads=4, kv_heads=2, queries=queries, keys=keys, dtype=torch.float64
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    seen = torch.ones(queries, keys, dtype=torch.bool).tril() if causal else None
    expected = torch.nn.functional.scaled_dot_product_attention(
        *leaves, attn_mask=seen, scale=0.3, enable_gqa=True
    )
    out, lse = attention_forward(q, k, v, causal, 0.3)
    torch.testing.assert_close(out, expected)
    scores = q @ k.repeat_interleave(2, 1).mT * 0.3
    if causal:
        scores = scores.masked_fill(~seen, -torch.inf)
    torch.testing.assert_close(lse.exp(), scores.exp().sum(-1))
    gradients = torch.autograd.grad(expected, leaves, dout)
    for got, wanted in zip(attention_backward(dout, q, k, v, causal, 0.3), gradients, strict=True):
        torch.testing.assert_close(got, wanted)
