"""The kernels of a decode step compile for sm_90 and sm_80 without a GPU: no tile spills, weights come in vectors
and, with programmatic dependent launch, before the wait."""

import re
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton.backends.compiler import GPUTarget

from lmkit.core.sampling import Sampling
from lmkit.generation import Decoder, kernel_step
from lmkit.kernels.decode import attention, products, sampling
from lmkit.kernels.decode.products import Fp8Matrix
from lmkit.kernels.decode.sampling import prepare_rules
from lmkit.model.transformer import TransformerLM
from lmkit.recipe.tables import ModelConfig

KERNELS = (
    *(products.single_row_kernel, products.few_rows_kernel),
    *(attention.attend_single_row_kernel, attention.attend_kernel),
    *(sampling.rules_kernel, sampling.advance_kernel),
)
# Bytes a thread: a few values that live across a loop, stored once. A tile too large spills hundreds.
# Releases of ptxas differ: triton 3.9's stores 16 and 24 where 3.7's stores none.
SPILLS = 32


class Shape(NamedTuple):
    d_model: int
    d_ff: int
    num_heads: int
    num_kv_heads: int


SHAPES = {
    "quickstart": Shape(128, 352, 4, 4),
    "162M": Shape(768, 2048, 12, 12),
    "162M, grouped": Shape(768, 2048, 12, 4),
    "1.3B": Shape(2048, 5504, 16, 16),
    "1.3B, grouped": Shape(2048, 5504, 16, 4),
    "8B, grouped": Shape(4096, 14336, 32, 8),
}
KINDS = {
    "greedy": Sampling(temperature=0.0),
    "all": Sampling(),
    "set": Sampling(top_p=0.9),
    "nested": Sampling(top_k=50, top_p=0.9, repetition_penalty=1.1),
}


@pytest.fixture
def prepare_step(stand_in_gpu, assembled, monkeypatch):
    """Prepares every launch of a step, whose numbers nobody reads: PTX of each, by the kernel's name."""

    def empty_fp8(weight):
        return Fp8Matrix(torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(len(weight)))

    monkeypatch.setattr(kernel_step, "to_fp8", empty_fp8)
    return prepare_all


def prepare_all(
    shape: Shape, rows: int, dtype: torch.dtype, kinds=("greedy",), *, pdl: bool = True, fp8: bool = False
) -> list[tuple[str, str]]:
    config = ModelConfig(vocab_size=50304, context_length=2048, num_layers=1, **shape._asdict())
    model = TransformerLM(config, device="meta", dtype=dtype).to_empty(device="cpu")
    for kind in kinds:
        options = {"sampling": KINDS[kind], "logprobs": kind == "all", "weights": "fp8" if fp8 else "same"}
        step = Decoder(model, rows, most=9, kernels=True, **options)._step
        step.pdl = pdl
        step._few(config.context_length)
        prepare_rules(step.logits, step.best, step.decoder.rules)
    return [
        (kernel.__name__, compiled.asm["ptx"])
        for kernel in KERNELS
        for cache in kernel.device_caches.values()
        for compiled in cache[0].values()
    ]


CASES = (
    *((name, torch.bfloat16, fp8, rows) for name in SHAPES for fp8 in (False, True) for rows in (1, 16)),
    *(("162M", torch.float32, False, rows) for rows in (1, 16)),
)


@pytest.mark.full
@pytest.mark.parametrize(("name", "dtype", "fp8", "rows"), CASES)
def test_no_tile_spills_and_weights_come_early_in_vectors(prepare_step, assembled, name, dtype, fp8, rows):
    for kernel, code in prepare_step(SHAPES[name], rows, dtype, fp8=fp8):
        before, wait, _ = code.partition("griddepcontrol.wait")
        assert wait or kernel == "rules_kernel", kernel  # which comes after a library's
        if kernel == "single_row_kernel" and name != "quickstart":  # whose rows are too short
            assert re.search(r"ld\.global\.v2" if fp8 else r"ld\.global\.v4", before), kernel
    for kernel, report in assembled.items():
        assert report.spills <= SPILLS, kernel


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_no_sampler_spills(prepare_step, assembled, kind):
    prepare_step(SHAPES["1.3B"], 1, torch.bfloat16, (kind,))
    assert assembled["advance_kernel"].spills <= SPILLS


@pytest.mark.full
def test_without_dependent_launch_they_compile_for_ampere(prepare_step, stand_in_gpu, assembled):
    stand_in_gpu.target = GPUTarget("cuda", 80, 32)
    for rows in (1, 16):
        for kernel, code in prepare_step(SHAPES["162M"], rows, torch.bfloat16, pdl=False):
            assert "griddepcontrol" not in code, kernel
