"""What a course asks of the parts of a Transformer, through the public API. Small numbers are worked by hand."""

import math

import torch
from torch.testing import assert_close

from lmkit.model import (
    Embedding,
    Linear,
    ModelConfig,
    RMSNorm,
    SwiGLU,
    TransformerLM,
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
