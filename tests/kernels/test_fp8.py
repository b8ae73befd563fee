"""The casts to fp8 compile for sm_90 without a GPU: nothing spills, and 16 bytes a thread are read at once."""

import re

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from lmkit.kernels import fp8, swiglu

KERNELS = (
    *(fp8.cast_rows_kernel, fp8.cast_transposed_kernel),
    *(swiglu.swiglu_cast_kernel, swiglu.swiglu_gradient_cast_kernel),
)


@pytest.mark.parametrize("width", [512, 2048, 5504, 11008])
def test_casts_compile(stand_in_gpu, assembled, monkeypatch, width):
    for calls in (fp8.row_calls, fp8.transposed_calls, swiglu.cast_forward_calls, swiglu.cast_backward_calls):
        monkeypatch.setattr(calls, "prepared", {})
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
    assert set(assembled) == {kernel.__name__ for kernel in KERNELS}
    assert all(report.spills == 0 for report in assembled.values())
    for kernel in KERNELS:
        (compiled,) = kernel.device_caches[0][0].values()
        kernel.device_caches.clear()
        loads = re.findall(r"ld\.global\.(v4)?", compiled.asm["ptx"])
        assert loads.count("v4") >= len(loads) - 1  # the other one is of the scale
