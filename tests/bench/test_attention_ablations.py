"""The ablations of the attention bench compute attention, or say why not: values and gradients, in Triton's
interpreter."""

import pytest
import torch
from attention_oracle import draw_inputs, faults_of
from raising import raises

from lmkit.attention import reference
from lmkit.bench.attention import build_variant
from lmkit.errors import UsageError

of_both = pytest.mark.parametrize("name", ["flash_triton:no_skip", "flash_triton:atomic"])


@pytest.mark.full
@pytest.mark.interpreter
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@of_both
def test_ablations_equal_the_oracle(name, causal):
    inputs = draw_inputs(heads=2, kv_heads=1, queries=70, keys=97, head_dim=32, dtype=torch.float16)
    assert faults_of(build_variant(name, "fp16"), reference, *inputs, causal=causal) == []


@of_both
def test_a_cpu_is_refused(name):
    q, k, v, _ = draw_inputs()
    with raises(UsageError, "attention.unsupported"):
        build_variant(name, "fp32")(q, k, v, causal=True)


@pytest.mark.interpreter
def test_atomic_refuses_a_head_dim_that_is_not_a_power_of_two():
    q, k, v, _ = draw_inputs(head_dim=80)
    with raises(UsageError, "attention.unsupported"):
        build_variant("flash_triton:atomic", "fp32")(q, k, v, causal=True)
