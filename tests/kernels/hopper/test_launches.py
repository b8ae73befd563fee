"""Launches that are prepared from descriptions of tensors are those that Triton makes of the tensors."""

import pytest
import torch

pytest.importorskip("triton", reason="the Hopper kernels need triton")

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

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
    constants = (64, 128, 2, True, False, 2, True, 240)
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
