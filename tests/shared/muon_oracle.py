"""What Muon's orthogonalisation does to singular values, done to them one by one."""

import torch

from lmkit.core.muon import COEFFICIENTS


def by_svd(matrix, iterations):
    """Return U p(S / |G|) V^T of G = U S V^T; p is the iterated polynomial."""
    u, values, vh = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm()
    a, b, c = COEFFICIENTS
    for _ in range(iterations):
        values = a * values + b * values**3 + c * values**5
    return u @ values.diag() @ vh
