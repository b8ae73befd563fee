"""Launches that are prepared from descriptions of tensors are those that Triton makes of the tensors, and a backward
launches the kernels of its head_dim and way."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="the Hopper kernels need triton")

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from lmkit.kernels.hopper import backward_launcher, forward_launcher
from lmkit.kernels.hopper.forward_kernel import forward_kernel
from lmkit.kernels.hopper.launches import Boxes, prepare_launch
from lmkit.kernels.hopper.tensors import shared_layout


def test_prepared_launch_is_tritons_own(stand_in_gpu):
    fused = torch.zeros(2, 128, 3, 4, 64, dtype=torch.bfloat16)
    q, k, v = (fused[:, :, i].transpose(1, 2) for i in range(3))
    out, lse = torch.zeros(2, 4, 128, 64, dtype=torch.bfloat16), torch.zeros(2, 4, 128)
    rows, keys = (1, 1, 64, 64), (1, 1, 128, 64)
    tensors = [(q, rows), (k, keys), (v, keys), (out, rows)]
    scalars = (128, 128, 4, 1, 1, 8, 0.18)
    constants = (64, 64, 128, 2, True, False, 2, True, 240)
    options = {"num_warps": 4, "maxnreg": 168, "launch_pdl": True}

    boxes = [Boxes(x.shape, x.stride(), x.dtype, box) for x, box in tensors]
    launch = prepare_launch(forward_kernel, (8, 1), [*boxes, torch.float32], scalars, constants, **options)
    launch(*[x.data_ptr() for x in (q, k, v, out, lse)])
    descriptors = [
        TensorDescriptor(x, list(x.shape), list(x.stride()), list(box), shared_layout(box, x.dtype))
        for x, box in tensors
    ]
    forward_kernel[(8, 1, 1)](*descriptors, lse, *scalars, *constants, **options)
    forward_kernel.device_caches.clear()
    prepared, ordinary = stand_in_gpu.launches
    assert prepared == ordinary


@pytest.fixture
def launcher(stand_in_gpu, monkeypatch):
    """Both launchers as they are, on tensors of the CPU. What is prepared and compiled here belongs to this
    stand-in."""
    modules = (forward_launcher, backward_launcher)
    for module in modules:
        monkeypatch.setattr(module, "selected", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(forward_launcher, "num_multiprocessors", lambda device: 132)
    yield SimpleNamespace(forward=forward_launcher.forward, backward=backward_launcher.backward)
    for module in modules:
        module._prepare.cache_clear()
        for kernel in vars(module).values():
            if isinstance(kernel, JITFunction):
                kernel.device_caches.clear()


FAST = ["prepare_kernel", "key_value_gradient_kernel", "finish_kernel"]
NARROW = ["prepare_kernel", "narrow_gradient_kernel", "finish_kernel"]
DETERMINISTIC = ["query_gradient_kernel", "key_value_gradient_kernel"]


@pytest.mark.parametrize(
    ("head_dim", "deterministic", "kernels", "key_rows"),
    [
        (64, False, NARROW, 64),
        (40, False, NARROW, 64),
        (64, True, DETERMINISTIC, 128),
        (80, False, FAST, 128),
        (96, True, DETERMINISTIC, 128),
        (128, False, FAST, 128),
        (128, True, DETERMINISTIC, 128),
        (136, False, ["query_gradient_kernel", "wide_gradient_kernel"], 64),
        (256, False, ["query_gradient_kernel", "wide_gradient_kernel"], 64),
        (256, True, ["query_gradient_kernel", "wide_gradient_kernel"], 64),
    ],
)
def test_kernels_of_a_backward(launcher, stand_in_gpu, head_dim, deterministic, kernels, key_rows):
    """And dK and dV's kernel, the second, copies K in boxes of as many rows as it expects (Triton does not look)."""
    q, k, v, out, dout = (torch.zeros(1, 2, 200, head_dim, dtype=torch.bfloat16) for _ in range(5))
    lse = torch.zeros(1, 2, 200)
    launcher.backward(dout, q, k, v, out, lse, causal=True, scale=0.125, deterministic=deterministic)
    assert [function[0] for _, _, function, *_ in stand_in_gpu.launches] == kernels
    key_box = next(
        x[5] for x in stand_in_gpu.launches[1][-1] if isinstance(x, tuple) and x[1] == k.data_ptr()
    )
    assert key_box[:3] == (1, 1, key_rows)  # in columns of as many as the swizzle takes


def rows(box, of_a_head):
    """Box, shape and strides of the sum of dQ, 2 x 2 heads, in rows of 32 numbers."""
    return (box, 32), (2 * 2 * of_a_head, 32), (32, 1)


def half_columns(padded):
    """The same where a box is half the columns of 64 of the `padded` queries."""
    return (4, 32, 32), (2 * 2 * padded // 16, 64, 32), (64 * 32, 32, 1)


@pytest.mark.parametrize(
    ("head_dim", "num_queries", "num_keys", "causal", "deterministic", "kernels", "sum_of_dq"),
    [
        (128, 2048, 2048, False, False, NARROW, half_columns(2048)),
        (128, 2049, 3000, False, False, NARROW, half_columns(2176)),
        (128, 2047, 2048, False, False, FAST, rows(256, 2048 * 4)),
        (128, 2048, 2047, False, False, FAST, rows(256, 2048 * 4)),
        (128, 2048, 2048, True, False, FAST, rows(256, 2048 * 4)),
        (96, 2048, 2048, False, False, FAST, rows(256, 2048 * 4)),
        (128, 2048, 2048, False, True, DETERMINISTIC, rows(256, 64)),  # not used
        (64, 2048, 100, False, False, NARROW, rows(128, 2048 * 2)),
    ],
)
def test_long_backward_without_a_mask(
    launcher, stand_in_gpu, head_dim, num_queries, num_keys, causal, deterministic, kernels, sum_of_dq
):
    """At head_dim 128 it is the narrow kernel's, and the sum of dQ, the last descriptor, is described as it takes
    it: box, shape, strides."""
    q, out, dout = (torch.zeros(2, 2, num_queries, head_dim, dtype=torch.bfloat16) for _ in range(3))
    k, v = (torch.zeros(2, 2, num_keys, head_dim, dtype=torch.bfloat16) for _ in range(2))
    lse = torch.zeros(2, 2, num_queries)
    launcher.backward(dout, q, k, v, out, lse, causal=causal, scale=0.125, deterministic=deterministic)
    assert [function[0] for _, _, function, *_ in stand_in_gpu.launches] == kernels
    described = [x for x in stand_in_gpu.launches[1][-1] if isinstance(x, tuple)]
    assert described[-1][5:8] == sum_of_dq


def test_long_backward_in_float16_keeps_its_kernel(launcher, stand_in_gpu):
    q = torch.zeros(1, 2, 2048, 128, dtype=torch.float16)
    launcher.backward(q, q, q, q, q, torch.zeros(1, 2, 2048), causal=False, scale=0.1, deterministic=False)
    assert [function[0] for _, _, function, *_ in stand_in_gpu.launches] == FAST


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 136])
def test_descriptors_end_with_the_head(launcher, stand_in_gpu, head_dim, deterministic):
    """What lies beyond, the copy engine fills up with zeros and does not write. (Its boxes are 64 columns wide, as
    many as the swizzle takes; a kernel copies several, side by side.)"""
    q, k, v, dout = (torch.zeros(2, 2, 200, head_dim, dtype=torch.bfloat16) for _ in range(4))
    out, lse = launcher.forward(q, k, v, causal=True, scale=0.125)
    gradients = launcher.backward(
        dout, q, k, v, out, lse, causal=True, scale=0.125, deterministic=deterministic
    )
    tensors = {x.data_ptr(): x for x in (q, k, v, dout, out, *gradients)}
    assert all(x.shape[3] == head_dim for x in tensors.values())
    seen = set()
    for *_, arguments in stand_in_gpu.launches:
        described = [
            x for x in arguments if isinstance(x, tuple) and x[0] == "descriptor" and x[1] in tensors
        ]
        for _, pointer, _, _, _, box, shape, strides, _ in described:
            assert shape == (2, 2, 200, head_dim)
            assert strides == tensors[pointer].stride()
            assert box[3] == 64
        seen |= {x[1] for x in described}
    # The fast way writes dQ through a pointer
    by_pointer = {gradients[0].data_ptr()} if head_dim <= 128 and not deterministic else set()
    assert seen == set(tensors) - by_pointer
