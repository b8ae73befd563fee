"""What a course asks of the parts of a Transformer, through the public API. Small numbers are worked by hand."""

import math

import pytest
import torch
from torch.testing import assert_close

from lmkit.attention import attention
from lmkit.model import (
    Embedding,
    Linear,
    ModelConfig,
    RMSNorm,
    RotaryEmbedding,
    SwiGLU,
    TransformerLM,
    apply_rope,
    silu,
    softmax,
)

TINY = ModelConfig(vocab_size=50, context_length=12, d_model=16, d_ff=40, num_layers=2, num_heads=4)


def test_softmax_is_the_share_of_each_exponential_along_any_dimension():
    x = torch.tensor([[0.0, math.log(3.0)], [0.0, 0.0]])
    assert_close(softmax(x, dim=-1), torch.tensor([[0.25, 0.75], [0.5, 0.5]]))
    assert_close(softmax(x, dim=0), torch.tensor([[0.5, 0.75], [0.5, 0.25]]))
    assert_close(softmax(x + 1e4), softmax(x), rtol=0, atol=1e-3)  # 1e4 + ln 3 is rounded to 2^-10 in float32
    assert_close(softmax(torch.tensor([-1e30, 5.0])), torch.tensor([0.0, 1.0]))


def test_silu_is_x_times_its_sigmoid():
    x = torch.tensor([-math.log(3.0), 0.0, math.log(3.0)])
    assert_close(silu(x), x * torch.tensor([0.25, 0.5, 0.75]))


def test_linear_and_embedding_are_a_product_without_bias_and_a_row():
    linear, embedding = Linear(3, 2), Embedding(5, 3)
    assert [tuple(p.shape) for p in linear.parameters()] == [(2, 3)]
    x = embedding(torch.tensor([[4, 0, 4]]))
    assert_close(x, embedding.weight[[4, 0, 4]][None])
    assert_close(linear(x), torch.einsum("bsi,oi->bso", x, linear.weight))


def test_rmsnorm_divides_by_the_root_of_the_mean_square():
    norm = RMSNorm(2, eps=0.0)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 10.0]))
    assert_close(norm(torch.tensor([3.0, 4.0])), torch.tensor([3.0, 40.0]) / math.sqrt(12.5))
    wide = torch.full((2,), 3e4, dtype=torch.float16)  # whose square is beyond float16
    assert_close(RMSNorm(2, dtype=torch.float16)(wide), torch.ones(2, dtype=torch.float16))


def test_swiglu_gates_w3_by_the_silu_of_w1():
    torch.manual_seed(0)
    ffn, x = SwiGLU(6, 10), torch.randn(2, 3, 6)
    w1, w2, w3 = (part.weight for part in (ffn.w1, ffn.w2, ffn.w3))
    assert [tuple(w.shape) for w in (w1, w2, w3)] == [(10, 6), (6, 10), (10, 6)]
    assert_close(ffn(x), (silu(x @ w1.T) * (x @ w3.T)) @ w2.T)


def test_rope_turns_pairs_of_channels_by_the_position_and_products_see_distances_only():
    rope = RotaryEmbedding(head_dim=4, context_length=64, theta=100.0)
    x = torch.tensor([1.0, 0.0, 0.0, 2.0]).expand(1, 64, 1, 4)  # (batch, seq, heads, head_dim)
    turned = apply_rope(x, rope(64))[0, :, 0]
    assert_close(turned[0], x[0, 0, 0])
    # Position 5: the first pair by 5, the second by 5 / sqrt(100).
    by_hand = [math.cos(5), math.sin(5), -2 * math.sin(0.5), 2 * math.cos(0.5)]
    assert_close(turned[5], torch.tensor(by_hand))
    products = turned @ turned.T
    for distance in (0, 7, 30):
        diagonal = products.diagonal(distance)
        assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=2e-6)  # a few float32 roundings
    assert_close(apply_rope(x[:, :3], rope.at(torch.tensor([9, 2, 40])))[0, :, 0], turned[[9, 2, 40]])


@pytest.mark.parametrize("kernel", ["reference", "vectorized", "sdpa"])
def test_masked_attention_averages_the_values_that_the_mask_shows(kernel):
    q = torch.zeros(1, 2, 3, 8)  # all visible keys count alike
    k, v = torch.randn(2, 1, 2, 4, 8)
    mask = torch.tensor([[True, False, False, True], [False, True, False, False], [True] * 4])
    mean = torch.stack([v[0, :, row].mean(dim=1) for row in mask], dim=1)[None]
    assert_close(attention(q, k, v, mask=mask, kernel=kernel), mean)


def test_later_tokens_change_nothing_that_comes_before_them():
    torch.manual_seed(0)
    model = TransformerLM(TINY)
    ids = torch.randint(50, (2, 12))
    logits = model(ids)
    assert logits.shape == (2, 12, 50)
    others = ids.clone()
    others[:, 7:] = (others[:, 7:] + 1) % 50
    changed = model(others)
    assert_close(changed[:, :7], logits[:, :7])
    assert (changed[:, 7:] - logits[:, 7:]).abs().amax(dim=-1).min() > 1e-3
    assert_close(model(ids[:, :5]), logits[:, :5], rtol=0, atol=1e-5)  # a shorter text


def test_the_transformer_is_pre_norm_blocks_between_embedding_and_head():
    """Written out from the published formulas, on the weights under the course's names, in float64."""
    torch.manual_seed(0)
    model = TransformerLM(TINY).double()
    w = model.state_dict()
    ids, position = torch.randint(50, (2, 12)), torch.arange(12)
    rope = RotaryEmbedding(head_dim=4, context_length=12, theta=TINY.rope_theta)
    visible = position[:, None] >= position

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + TINY.norm_eps).sqrt() * w[f"{name}.weight"]

    x = w["token_embeddings.weight"][ids]
    for layer in ("layers.0", "layers.1"):
        h = norm(x, f"{layer}.ln1")
        q, k, v = (
            (h @ w[f"{layer}.attn.{name}_proj.weight"].T).unflatten(-1, (4, 4)) for name in ("q", "k", "v")
        )
        q, k = apply_rope(q, rope(12)), apply_rope(k, rope(12))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 2  # sqrt of head_dim 4
        p = scores.masked_fill(~visible, -math.inf).softmax(-1)
        out = torch.einsum("bhqk,bkhd->bqhd", p, v).flatten(-2)
        x = x + out @ w[f"{layer}.attn.output_proj.weight"].T
        h = norm(x, f"{layer}.ln2")
        w1, w2, w3 = (w[f"{layer}.ffn.w{i}.weight"] for i in (1, 2, 3))
        x = x + (silu(h @ w1.T) * (h @ w3.T)) @ w2.T
    expected = norm(x, "ln_final") @ w["lm_head.weight"].T
    assert_close(model(ids), expected, rtol=0, atol=1e-6)  # the table of rotations is float32
