"""Muon on a GPU, where it orthogonalises in bf16: against an SVD in float64; it decides on the device."""

import pytest
import torch
from muon_oracle import by_svd, check_refused_steps

from lmkit.core.muon import orthogonalize

pytestmark = pytest.mark.gpu

# Rounding of bf16, 2^-9 of a singular value near 1, over 15 products: 0.007 to 0.025, most in a single row.
ROUNDING = 0.03


def error(found, exact):
    """Return the largest error of a matrix, over its Frobenius norm."""
    distance = (found.double() - exact).norm(dim=(-2, -1))
    return (distance / exact.norm(dim=(-2, -1))).max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(1, 40), (33, 1), (7, 3), (64, 64), (130, 129), (256, 700), (1376, 512), (2048, 512)]
)
def test_every_matrix_of_a_batch_is_orthogonalised_as_by_svd(shape, dtype):
    torch.manual_seed(0)
    scales = torch.tensor([1e-9, 1.0, 1e9, 0.0], device="cuda")[:, None, None]
    matrices = (torch.randn(4, *shape, device="cuda") * scales).to(dtype)
    found = orthogonalize(matrices, dtype=torch.bfloat16)
    assert found.dtype == dtype
    assert not found[3].any()
    exact = torch.stack([by_svd(matrix.double(), 5) for matrix in matrices[:3]])
    assert error(found[:3], exact) < ROUNDING
    joined = orthogonalize(matrices.unflatten(0, (2, 2)), dtype=torch.bfloat16)
    assert joined.shape == (2, 2, *shape)
    assert error(joined.flatten(0, 1)[:3], exact) < ROUNDING


def test_the_device_refuses_steps():
    check_refused_steps("cuda")
