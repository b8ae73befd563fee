"""The kernels of a decode step compile for sm_90 and sm_80 without a GPU: no tile spills, weights come in vectors
and, with programmatic dependent launch, before the wait."""

import re
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton.backends.compiler import GPUTarget

from lmkit.core.sampling import Sampling
from lmkit.kernels.decode import attention, products, sampling
from lmkit.kernels.decode.products import Fp8Matrix, Matrix, Stream
from lmkit.kernels.decode.rows import Rows, Rules, kind_of

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
    heads: int
    kv_heads: int


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
def prepare_step(stand_in_gpu, assembled):
    """Prepares every launch of a step: PTX of each, by the kernel's name."""
    yield prepare_all
    for kernel in KERNELS:
        kernel.device_caches.clear()


def prepare_all(
    shape: Shape, rows: int, dtype: torch.dtype, kinds=("greedy",), *, pdl: bool = True, fp8: bool = False
) -> list[tuple[str, str]]:
    vocab_size, capacity = 50304, 2048
    width, head_dim = shape.d_model, shape.d_model // shape.heads
    qkv_width = (shape.heads + 2 * shape.kv_heads) * head_dim

    def array(*sizes: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype)

    def matrix(*sizes: int) -> Matrix:
        if not fp8:
            return array(*sizes)
        return Fp8Matrix(array(*sizes, dtype=torch.float8_e4m3fn), array(sizes[0], dtype=torch.float32))

    x, qkv, hidden = array(rows, width), array(rows, qkv_width), array(rows, shape.d_ff)
    gain, parts = array(width), array(rows * width, dtype=torch.float32)
    stream = Stream(x, array(rows, width), parts)
    keys = array(rows, shape.kv_heads, capacity, head_dim)
    place, marks = array(rows, dtype=torch.int64), array(rows, vocab_size, dtype=torch.int8)
    table = array(capacity, head_dim // 2, 2, dtype=torch.float32)
    space = attention.attend_space(rows, shape.heads, shape.kv_heads, head_dim, capacity, x)
    logits = array(rows, vocab_size, dtype=torch.float32)
    settings = array(5, dtype=torch.float64)
    best = array(rows, products.SLOTS.value, dtype=torch.int64)
    product = products.prepare_product
    eps = 1e-5
    product("qkv", x, matrix(qkv_width, width), qkv, stream, num_parts=48, eps=eps, pdl=pdl)
    attention.prepare_attend(qkv, keys, keys, place, table, x, space, longest=capacity, pdl=pdl)
    product("output", x, matrix(width, width), x, stream, then="residual", gain=gain, pdl=pdl)
    joint = matrix(2 * shape.d_ff, width)
    product("gate_up", x, joint, hidden, stream, then="swiglu", num_parts=48, eps=eps, pdl=pdl)
    product("down", hidden, matrix(width, shape.d_ff), x, stream, then="residual", gain=gain, pdl=pdl)
    for kind in kinds:
        way = KINDS[kind]
        rules = Rules(marks[0], marks, settings, way.repetition_penalty != 1)
        head = array(vocab_size, width)
        product(
            "head", x, matrix(vocab_size, width), logits, stream, then="logits", num_parts=48, eps=eps, rules=rules,
            best=best, pdl=pdl,
        )  # fmt: skip
        sampling.prepare_rules(logits, best, rules)
        state = Rows(place, array(rows, capacity + 1, dtype=torch.int64), *[place] * 4, logits[:, 0])
        sampling.prepare_advance(
            logits, best, state, rules, head, gain, stream, 48, sampling=way, most=9,
            logprobs=kind_of(way) == "all", pdl=pdl,
        )  # fmt: skip
    return [
        (kernel.__name__, compiled.asm["ptx"])
        for kernel in KERNELS
        for cache in kernel.device_caches.values()
        for compiled in cache[0].values()
    ]


FAST = (("162M", torch.bfloat16, False, 16), ("1.3B", torch.bfloat16, True, 1))
ALL = (
    *((name, torch.bfloat16, fp8, rows) for name in SHAPES for fp8 in (False, True) for rows in (1, 16)),
    *(("162M", torch.float32, False, rows) for rows in (1, 16)),
)


@pytest.mark.parametrize(
    ("name", "dtype", "fp8", "rows"),
    [case if case in FAST else pytest.param(*case, marks=pytest.mark.full) for case in ALL],
)
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
