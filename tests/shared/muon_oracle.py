"""What Muon's orthogonalisation does to singular values, done to them one by one; steps that are refused."""

import math

import torch

from lmkit.core.muon import COEFFICIENTS
from lmkit.optim.muon import Muon


def by_svd(matrix, iterations):
    """Return U p(S / |G|) V^T of G = U S V^T; p is the iterated polynomial."""
    u, values, vh = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm()
    a, b, c = COEFFICIENTS
    for _ in range(iterations):
        values = a * values + b * values**3 + c * values**5
    return u @ values.diag() @ vh


def check_refused_steps(device):
    """They change nothing, whoever decides; the others are those of an optimizer that never saw them."""
    torch.manual_seed(0)
    matrix = torch.nn.Parameter(torch.randn(6, 4).to(device))
    twin = torch.nn.Parameter(matrix.detach().clone())
    optimizer, other = (
        Muon([{"params": [one], "is_matrix": True}], lr=0.1, weight_decay=0.5) for one in (matrix, twin)
    )
    for factor in (0.5, math.nan, 3.0):
        applied = math.isfinite(factor)
        momentum = optimizer.state[matrix].get("momentum_buffer", torch.zeros((), device=device))
        before = (matrix.detach().clone(), momentum.clone())
        matrix.grad = torch.randn_like(matrix) if applied else torch.full_like(matrix, math.nan)
        optimizer.decision = torch.tensor(applied, device=device)
        optimizer.gradient_factor = torch.tensor(factor, device=device)
        if applied:
            twin.grad = matrix.grad * factor
            other.step()
        optimizer.step()
        optimizer.zero_grad()
        after = matrix.detach(), optimizer.state[matrix]["momentum_buffer"]
        assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True)) is not applied
        assert all(tensor.isfinite().all() for tensor in after)
    # The same sums; bf16 on a GPU rounds them alike. A rate that is taken on the device is rounded once more.
    torch.testing.assert_close(matrix, twin, rtol=1e-6, atol=1e-6)
