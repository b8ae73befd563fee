import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items):
    """Kernels run here through Triton's interpreter, which has to be on before Triton is imported."""
    skip = pytest.mark.skip(reason="needs TRITON_INTERPRET=1 (nox -s interpreter)")
    for item in items:
        if item.get_closest_marker("interpreter") and not INTERPRETED:
            item.add_marker(skip)


@pytest.fixture
def random_inputs():
    """Makes (q, k, v, dout), normal, never zero; (batch, heads, seq, head_dim)."""

    def make(
        batch=1, heads=2, kv_heads=None, queries=16, keys=None, head_dim=16, dtype=torch.float32, seed=0
    ):
        generator = torch.Generator().manual_seed(seed)
        keys = queries if keys is None else keys
        shapes = [
            (batch, heads, queries, head_dim),
            (batch, kv_heads or heads, keys, head_dim),
            (batch, kv_heads or heads, keys, head_dim),
            (batch, heads, queries, head_dim),
        ]
        return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)

    return make
