"""RoPE against explicit rotation matrices."""

import math

import pytest
import torch

from lmkit.core.model import RotaryEmbedding, apply_rope


def rotation_matrix(position: int, head_dim: int, theta: float) -> torch.Tensor:
    """The block-diagonal matrix of RoFormer's eq. 15, entry by entry."""
    matrix = torch.zeros(head_dim, head_dim, dtype=torch.float64)
    for pair in range(head_dim // 2):
        angle = position * theta ** (-2 * pair / head_dim)
        i = 2 * pair
        matrix[i, i], matrix[i, i + 1] = math.cos(angle), -math.sin(angle)
        matrix[i + 1, i], matrix[i + 1, i + 1] = math.sin(angle), math.cos(angle)
    return matrix


@pytest.mark.parametrize("theta", [10_000.0, 500.0])
@pytest.mark.parametrize("head_dim", [2, 6, 16])
def test_each_position_is_multiplied_by_its_matrix(head_dim, theta):
    torch.manual_seed(0)
    rope = RotaryEmbedding(head_dim=head_dim, context_length=40, theta=theta)
    x = torch.randn(2, 40, 3, head_dim, dtype=torch.float64)
    # (batch, seq, heads, head_dim)
    expected = torch.stack([x[:, p] @ rotation_matrix(p, head_dim, theta).T for p in range(40)], dim=1)
    # The table is float32: its entries are off by 2^-25 at most.
    torch.testing.assert_close(apply_rope(x, rope(40)), expected, rtol=0, atol=1e-6)


def test_chosen_positions_agree_with_the_sequence():
    torch.manual_seed(0)
    rope = RotaryEmbedding(head_dim=8, context_length=16)
    x = torch.randn(2, 16, 2, 8)
    positions = torch.tensor([[3, 4], [0, 15]])
    chosen = torch.arange(2)[:, None], positions
    assert torch.equal(apply_rope(x[chosen], rope.at(positions)), apply_rope(x, rope(16))[chosen])


def test_distant_positions_are_exact_in_a_model_cast_to_bfloat16():
    rope = RotaryEmbedding(head_dim=4, context_length=100_001).bfloat16()
    assert rope.cos_sin.dtype == torch.float32
    for pair, angle in enumerate((100_000.0, 100_000.0 / 100)):
        expected = torch.tensor([math.cos(angle), math.sin(angle)])
        # float32 rounding
        torch.testing.assert_close(rope.cos_sin[100_000, pair], expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    "cut",
    [
        lambda x: x[..., :8],  # rows an odd distance apart
        lambda x: x[..., 1:],
        lambda x: x.flatten()[1:769].view(2, 16, 3, 8),  # contiguous from an odd place on
        lambda x: x[:, :, :, :8].transpose(1, 3).contiguous().transpose(1, 3),  # channels far apart
        lambda x: x[..., :8].contiguous(),
    ],
    ids=["odd strides", "odd strides and offset", "odd offset", "last stride not 1", "contiguous"],
)
def test_where_the_channels_lie_does_not_matter(cut):
    torch.manual_seed(0)
    rope = RotaryEmbedding(head_dim=8, context_length=16)
    x = cut(torch.randn(2, 16, 3, 9))
    expected = apply_rope(x.clone(memory_format=torch.contiguous_format), rope(16))
    # The same four products and two sums in float32; a complex product may fuse one of each.
    torch.testing.assert_close(apply_rope(x, rope(16)), expected, rtol=1e-6, atol=1e-6)
    compiled = torch.compile(apply_rope, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, rope(16)), expected, rtol=1e-6, atol=1e-6)


def test_odd_channels_and_long_sequences_are_refused():
    with pytest.raises(ValueError, match="head_dim 5 is odd"):
        RotaryEmbedding(head_dim=5, context_length=8)
    with pytest.raises(ValueError, match="9 tokens is longer than the context of 8"):
        RotaryEmbedding(head_dim=4, context_length=8)(9)


def test_the_table_of_a_long_context_has_the_positions_that_are_used(monkeypatch):
    """A `max_position_embeddings` of 16 million would take 4 GB."""
    assert RotaryEmbedding(head_dim=64, context_length=1 << 24).cos_sin.nbytes == 1 << 25
    expected = RotaryEmbedding(head_dim=4, context_length=100, theta=50.0).cos_sin
    monkeypatch.setattr("lmkit.core.model.INITIAL_POSITIONS", 8)
    rope = RotaryEmbedding(head_dim=4, context_length=100, theta=50.0)
    for seq, size in ((8, 8), (9, 16), (10, 16), (45, 45), (46, 90), (91, 100), (100, 100)):
        with torch.inference_mode():
            assert torch.equal(rope(seq), expected[:seq])
        assert not rope.cos_sin.is_inference()
        assert len(rope.cos_sin) == size
        assert torch.equal(rope.to(torch.bfloat16).cos_sin, expected[:size])
    with pytest.raises(ValueError, match="101 tokens is longer than the context of 100"):
        rope.reserve(101)


def test_the_table_follows_the_default_device_but_not_to_where_nothing_is_computed():
    """A model of deferred weights gets its weights from a file, but no table."""
    with torch.device("meta"):
        deferred = RotaryEmbedding(head_dim=8, context_length=16)
    with torch.device("cpu"):
        made = RotaryEmbedding(head_dim=8, context_length=16)
    assert torch.equal(deferred.cos_sin, made.cos_sin)
