import pytest
import torch


def pytest_collection_modifyitems(items):
    """Everything in this folder needs a CUDA device."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture
def random_inputs():
    """Makes (q, k, v, dout) on the GPU, normal, never zero; (batch, heads, seq, head_dim)."""

    def make(
        batch=1, heads=2, kv_heads=None, queries=16, keys=None, head_dim=64, dtype=torch.bfloat16, seed=0
    ):
        generator = torch.Generator("cuda").manual_seed(seed)
        keys = queries if keys is None else keys
        shapes = [
            (batch, heads, queries, head_dim),
            (batch, kv_heads or heads, keys, head_dim),
            (batch, kv_heads or heads, keys, head_dim),
            (batch, heads, queries, head_dim),
        ]
        return tuple(torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes)

    return make
