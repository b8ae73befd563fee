import pytest
import torch


@pytest.fixture
def random_inputs():
    """Makes (q, k, v, dout), normal, never zero; (batch, heads, seq, head_dim)."""

    def make(
        batch=2, heads=2, kv_heads=None, queries=16, keys=None, head_dim=16, dtype=torch.float32, seed=0
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
