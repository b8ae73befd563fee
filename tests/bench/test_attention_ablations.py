"""The ablations of the attention bench compute attention: values and gradients, in Triton's interpreter."""

import os

import pytest
import torch
from attention_oracle import draw_inputs, faults_of

from lmkit.attention import reference
from lmkit.bench.attention_variants import build_variant

pytestmark = [
    pytest.mark.full,
    pytest.mark.interpreter,
    pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="needs TRITON_INTERPRET=1 (nox -s full)"),
]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", ["flash_triton:no_skip", "flash_triton:atomic"])
def test_ablations_equal_the_oracle(name, causal):
    inputs = draw_inputs(heads=2, kv_heads=1, queries=70, keys=97, head_dim=32, dtype=torch.float16)
    assert faults_of(build_variant(name, "fp16"), reference, *inputs, causal=causal) == []
