"""The oracle of the attention tests accepts a right kernel and rejects kernels that are wrong as kernels go wrong."""

import math

import pytest
import torch
from attention_oracle import exact_attention, faults_of

from lmkit.attention import attention, reference


def mask_off_by(offset):
    def broken(q, k, v, *, causal, scale):
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(offset)
        return attention(q, k, v, mask=visible, kernel="reference")

    return broken


def last_key_tile_skipped(q, k, v, *, causal, scale):
    kept = (k.shape[2] - 1) // 64 * 64
    return reference(q, k[:, :, :kept], v[:, :, :kept], causal=causal)


def last_query_tile_unwritten(q, k, v, *, causal, scale):
    kept = (q.shape[2] - 1) // 64 * 64
    out = reference(q, k, v, causal=causal)
    return torch.cat([out[:, :, :kept], out[:, :, kept:] * 0.0], dim=2)


def gradient_of_the_first_key_halved(q, k, v, *, causal, scale):
    factor = torch.ones(k.shape[2], 1, dtype=k.dtype).index_fill(0, torch.tensor(0), 0.5)
    k = k * factor + (k * (1 - factor)).detach()  # k itself, with another gradient
    return reference(q, k, v, causal=causal)


BROKEN = {
    "zeros": lambda q, k, v, **_: (q + k.sum() + v.sum()) * 0.0,
    "scale x 1.02": lambda q, k, v, **_: reference(q, k, v, causal=True, scale=q.shape[-1] ** -0.5 * 1.02),
    "mask sees one too many": mask_off_by(1),
    "mask sees one too few": mask_off_by(-1),
    "last key tile skipped": last_key_tile_skipped,
    "last query tile unwritten": last_query_tile_unwritten,
    "one row of dk halved": gradient_of_the_first_key_halved,
}

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


@dtypes
@pytest.mark.parametrize("name", BROKEN)
def test_broken_attention_is_rejected(name, dtype, random_inputs):
    inputs = random_inputs(queries=129, head_dim=32, dtype=dtype)
    assert faults_of(BROKEN[name], reference, *inputs, causal=True)


@dtypes
def test_correct_attention_is_accepted(dtype, random_inputs):
    inputs = random_inputs(queries=129, head_dim=32, dtype=dtype)
    assert faults_of(reference, reference, *inputs, causal=True, allowance=1.0) == []


def test_oracle_agrees_with_a_case_worked_by_hand():
    # One head, head_dim 1, keys 0 and ln 3, values 10 and 20, query 1: weights 1/4 and 3/4.
    q = torch.tensor([[[[1.0], [1.0]]]], dtype=torch.float64)
    k = torch.tensor([[[[0.0], [math.log(3.0)]]]], dtype=torch.float64)
    v = torch.tensor([[[[10.0], [20.0]]]], dtype=torch.float64)
    (out,) = exact_attention(q, k, v, None, causal=True, scale=1.0)
    torch.testing.assert_close(out.flatten(), torch.tensor([10.0, 17.5], dtype=torch.float64))
