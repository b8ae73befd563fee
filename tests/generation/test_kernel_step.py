"""The step of kernels in Triton's interpreter: it writes the same as PyTorch's operations."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import decoder_checks as checks
from live_memory import LiveMemory
from marking import full_but

from lmkit.core.sampling import Sampling
from lmkit.generation import Decoder
from lmkit.generation.decoder import decoder_needs, kernel_step_needs

pytestmark = pytest.mark.interpreter


OFTEN = [
    (2, (9, 3), {"num_kv_heads": 2, "qk_norm": True, "qkv_bias": True}),
    (2, (9, 3), {"attention_window": 4, "attention": "flash_triton"}),
]
CASES = [
    *((1, (17,), fields) for fields in ({}, {"weights": "fp8"})),
    *((17, (1, 9), fields) for fields in ({}, {"d_head": 32, "qk_norm": True}, {"qkv_bias": True})),
    *((1, (280,), {"num_kv_heads": 2}), (3, (1, 9), {"weights": "fp8", "tie_embeddings": True})),
    (2, (9, 3), {"d_head": 32, "num_kv_heads": 2}),
    (3, (1, 66, 280), {"num_kv_heads": 2, "tie_embeddings": True}),
]


@pytest.mark.parametrize(("rows", "lengths", "fields"), full_but(OFTEN, OFTEN + CASES), ids=str)
@pytest.mark.parametrize(
    "sampling", [Sampling(0.0), Sampling(0.9, top_p=0.8, repetition_penalty=1.3)], ids=str
)
def test_writes_what_plain_operations_write(rows, lengths, fields, sampling):
    checks.check_equals_plain_step(rows, lengths, sampling, "cpu", **fields)


@pytest.mark.parametrize("penalty", [1.0, 1.3])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_fault_165_a_kernel_step_allocates_what_was_counted(rows, penalty):
    model, sampling = checks.model_of("cpu", num_kv_heads=2), Sampling(0.9, repetition_penalty=penalty)
    cache, others, _ = decoder_needs(model, rows, sampling, kernels=True)
    _, later = kernel_step_needs(model, rows)
    with LiveMemory() as memory_used:
        decoder = Decoder(model, rows, sampling=sampling, most=10, kernels=True)
    assert decoder.rows == rows
    once = 101 + 5 * 8  # banned ids, settings
    assert memory_used.live == pytest.approx(rows * (cache + others - later) + once, abs=100)
