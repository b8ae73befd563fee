"""The fused kernels of a training step compile for sm_90 without a GPU: nothing spills, memory is read in vectors."""

import re
from functools import partial

import pytest
import torch
from marking import full_but, full_except

pytest.importorskip("triton", reason="Triton is not installed")

from lmkit.kernels import cross_entropy, embedding, fp8, norm, rope, swiglu

KERNELS = (
    *(norm.add_norm_kernel, norm.norm_gradient_kernel, rope.rope_kernel),
    *(swiglu.swiglu_kernel, swiglu.swiglu_gradient_kernel, cross_entropy.cross_entropy_kernel),
    *(embedding.scatter_add_kernel, embedding.sorted_sum_kernel),
)
# Loads and stores of single values in each kernel; all others move 16 bytes a thread.
SINGLE = dict.fromkeys(("rope_kernel", "swiglu_kernel", "swiglu_gradient_kernel"), (0, 0))
SINGLE |= {"add_norm_kernel": (0, 1), "norm_gradient_kernel": (1, 0)}
SINGLE |= {"cross_entropy_kernel": (3, 2), "scatter_add_kernel": (1, 0)}
CASTS = (fp8.cast_rows_kernel, fp8.cast_transposed_kernel)
CASTS += (swiglu.swiglu_cast_kernel, swiglu.swiglu_gradient_cast_kernel)
D_FF = {128: 352, 512: 1376, 768: 2048, 1024: 2752, 2048: 5504, 4096: 11008}


@pytest.fixture
def ptx(assembled):
    """Launches every kernel for a model of this width; returns name -> PTX of each compiled variant."""

    def launch_all(width, dtype):
        def array(*shape, dtype=dtype):
            return torch.zeros(shape, dtype=dtype)

        def differentiate(function, *inputs):
            inputs = [x.requires_grad_() for x in inputs]
            results = function(*inputs)
            results = results if isinstance(results, tuple) else (results,)
            torch.autograd.grad(results, inputs, [torch.ones_like(x) for x in results])

        x, gain = array(2, 16, width), array(width, dtype=torch.float32)
        differentiate(partial(norm.add_rms_norm, dtype=dtype), x, array(2, 16, width), gain)
        table = array(16, min(width, 128) // 4, 2, dtype=torch.float32)
        rotate = partial(rope.Rope.apply, array(2, 16, 3 * width), table)
        for in_place in (True, False):
            rotate((width // min(width // 2, 64), not in_place, in_place, False))
        differentiate(swiglu.swiglu, array(2, 16, 2 * D_FF[width]))
        ids, logits = array(32, dtype=torch.int64), cross_entropy.empty_logits(32, array(50257, 1))
        floats = partial(array, dtype=torch.float32)
        cross_entropy.cross_entropy_(logits, ids, floats(1), floats(32))
        for deterministic in (False, True):
            embedding.gradient(x, ids, 50257, deterministic, dtype)
        return [
            (kernel.__name__, compiled.asm["ptx"])
            for kernel in KERNELS
            for compiled in kernel.device_caches[0][0].values()
        ]

    return launch_all


@pytest.mark.parametrize("dtype", full_except(torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("width", full_but([768], D_FF))
def test_nothing_spills_and_memory_is_read_in_vectors(ptx, assembled, width, dtype):
    for name, code in ptx(width, dtype):
        if name in SINGLE and width >= 768:  # small rows have less than 16 bytes for a thread
            assert tuple(len(re.findall(rf"{way}\.global\.b", code)) for way in ("ld", "st")) == SINGLE[name]
            assert re.search(r"ld\.global\.v4", code)
    spills = {name: report.spills for name, report in assembled.items()}
    assert spills == dict.fromkeys((kernel.__name__ for kernel in KERNELS), 0)


@pytest.mark.parametrize("width", full_except(2048, 512, 5504, 11008))
def test_casts_compile(assembled, width):
    """Nothing spills, and 16 bytes a thread are read at once."""
    x = torch.zeros(256, width, dtype=torch.bfloat16)
    low, scale = fp8.cast_rows(x)
    assert low.shape == x.shape
    assert scale.shape == (256, 1)
    low, scales = fp8.cast_transposed(x, scale.amax())
    assert low.shape == (width, 256)
    assert scales.shape == (1, width)
    joint = x.requires_grad_()
    out = swiglu.swiglu_and_cast(joint)
    (gradient,) = torch.autograd.grad(out, joint, torch.ones_like(out))
    for made in (out, gradient):
        low, scale = fp8.take_cast(made)
        assert low.shape == made.shape
        assert scale.shape == (256, 1)
    assert set(assembled) == {kernel.__name__ for kernel in CASTS}
    assert all(report.spills == 0 for report in assembled.values())
    for kernel in CASTS:
        (compiled,) = kernel.device_caches[0][0].values()
        loads = re.findall(r"ld\.global\.(v4)?", compiled.asm["ptx"])
        assert loads.count("v4") >= len(loads) - 1  # the other one is of the scale
