"""Which strides the copy engine takes, and what the kernels answer to requests that they cannot take."""

import pytest
import torch

pytest.importorskip("triton", reason="the Hopper kernels need triton")

from lmkit.kernels import hopper
from lmkit.kernels.hopper.tensors import strides_in_order_of, suits_copy_engine, tma_strides


def strides_of(tensor):
    return tma_strides(tensor.shape, tensor.stride(), tensor.element_size())


def test_natural_layouts_need_no_copy():
    fused = torch.zeros(2, 100, 3 * 4 * 64, dtype=torch.bfloat16)
    q = fused[..., : 4 * 64].view(2, 100, 4, 64).transpose(1, 2)
    assert strides_of(q) == (100 * 768, 64, 768, 1)
    assert strides_of(torch.zeros(2, 4, 100, 64, dtype=torch.bfloat16)) == (25600, 6400, 64, 1)


def test_odd_strides_are_refused():
    half = torch.bfloat16
    assert not suits_copy_engine(torch.zeros(2, 4, 100, 65, dtype=half)[..., :64])  # rows not 16-byte aligned
    assert not suits_copy_engine(torch.zeros(2, 4, 100, 72, dtype=half)[..., 1:65])  # nor the base
    assert not suits_copy_engine(torch.zeros(2, 4, 64, 100, dtype=half).mT)  # head_dim not contiguous
    assert not suits_copy_engine(torch.zeros(1, 1, 1, 1, dtype=half).expand(2, 4, 100, 64))
    assert suits_copy_engine(torch.zeros(2, 4, 100, 72, dtype=half)[..., 8:])


def test_strides_of_single_elements_do_not_matter():
    row = torch.zeros(65, dtype=torch.bfloat16)[:64].as_strided((1, 1, 1, 64), (65, 65, 65, 1))
    assert strides_of(row) is not None


@pytest.mark.parametrize("natural", [True, False])
def test_outputs_lie_as_inputs_do(natural):
    tensor = torch.zeros(2, 100, 4, 64) if natural else torch.zeros(2, 4, 100, 64)
    view = tensor.transpose(1, 2) if natural else tensor
    assert strides_in_order_of(view.shape, view.stride()) == view.stride()


def test_tensors_on_the_cpu_are_refused():
    q = torch.zeros(1, 1, 8, 64, dtype=torch.bfloat16)
    assert "CUDA" in hopper.unsupported_reason(q, q, q)
