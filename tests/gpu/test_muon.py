"""Muon on a GPU, where it orthogonalises in bf16: against an SVD in float64, and its step against the formula."""

import math

import pytest
import torch
from muon_oracle import by_svd
from torch import nn

from lmkit.core.muon import orthogonalize
from lmkit.optim.muon import Muon

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


def test_steps_equal_the_formula():
    """Matrices of three shapes; the device decides that the third step is skipped."""
    torch.manual_seed(0)
    shapes = ((192, 128), (128, 128), (96, 200))
    params = [nn.Parameter(torch.randn(*shape, device="cuda")) for shape in shapes]
    groups = [{"params": params, "is_matrix": True, "weight_decay": 0.02}]
    optimizer = Muon(groups, lr=0.01, matrix_lr=0.05, momentum=0.8)
    before = [param.detach().double() for param in params]
    exact = [part.clone() for part in before]
    means = [torch.zeros_like(part) for part in exact]
    for applied in (True, True, False, True):
        for param in params:
            param.grad = torch.randn_like(param) if applied else torch.full_like(param, math.nan)
        optimizer.decision = torch.tensor(float(applied), device="cuda")
        optimizer.gradient_factor = torch.tensor(0.5, device="cuda")
        optimizer.step()
        if not applied:
            continue
        gradients = [param.grad.double() / 2 for param in params]
        for part, mean, gradient in zip(exact, means, gradients, strict=True):
            mean.mul_(0.8).add_(0.2 * gradient)
            direction = by_svd(0.8 * mean + 0.2 * gradient, 5)
            rows, columns = part.shape
            part.sub_(0.05 * 0.02 * part).sub_(0.05 * max(1, rows / columns) ** 0.5 * direction)
    for param, wanted, start in zip(params, exact, before, strict=True):
        assert error(param.detach() - start, wanted - start) < ROUNDING
    for param, mean in zip(params, means, strict=True):
        momentum = optimizer.state[param]["momentum_buffer"]
        torch.testing.assert_close(momentum.double(), mean, rtol=1e-5, atol=1e-6)
