"""The oracle of the attention tests accepts a right kernel and rejects kernels that are wrong as kernels go wrong."""

import math

import pytest
import torch
from attention_oracle import draw_inputs, exact_attention, faults_of
from planted_kernels import last_tile_skipped, mask_too_narrow, mask_too_wide, scaled, zeros

from lmkit.attention import reference


def last_query_tile_unwritten(q, k, v, *, causal):
    kept = (q.shape[2] - 1) // 64 * 64
    out = reference(q, k, v, causal=causal)
    return torch.cat([out[:, :, :kept], out[:, :, kept:] * 0.0], dim=2)


def gradient_of_the_first_key_halved(q, k, v, *, causal):
    factor = torch.ones(k.shape[2], 1, dtype=k.dtype).index_fill(0, torch.tensor(0), 0.5)
    k = k * factor + (k * (1 - factor)).detach()  # k itself, with another gradient
    return reference(q, k, v, causal=causal)


BROKEN = (
    *(zeros, scaled, mask_too_wide, mask_too_narrow, last_tile_skipped),
    *(last_query_tile_unwritten, gradient_of_the_first_key_halved),
)

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


@dtypes
@pytest.mark.parametrize("broken", BROKEN)
def test_broken_attention_is_rejected(broken, dtype):
    inputs = draw_inputs(batch=2, queries=129, head_dim=32, dtype=dtype)
    assert faults_of(lambda *qkv, causal, scale: broken(*qkv, causal=causal), reference, *inputs, causal=True)


@dtypes
def test_correct_attention_is_accepted(dtype):
    inputs = draw_inputs(batch=2, queries=129, head_dim=32, dtype=dtype)
    assert faults_of(reference, reference, *inputs, causal=True, allowance=1.0) == []


def test_oracle_agrees_with_a_case_worked_by_hand():
    # One head, head_dim 1, keys 0 and ln 3, values 10 and 20, query 1: weights 1/4 and 3/4.
    q = torch.tensor([[[[1.0], [1.0]]]], dtype=torch.float64)
    k = torch.tensor([[[[0.0], [math.log(3.0)]]]], dtype=torch.float64)
    v = torch.tensor([[[[10.0], [20.0]]]], dtype=torch.float64)
    (out,) = exact_attention(q, k, v, None, causal=True, scale=1.0)
    torch.testing.assert_close(out.flatten(), torch.tensor([10.0, 17.5], dtype=torch.float64))
