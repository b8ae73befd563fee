"""Attention on a joined projection, in Triton's interpreter: the same numbers as on q, k and v apart."""

import pytest
import torch
from marking import full_but

pytest.importorskip("triton", reason="Triton is not installed")

from lmkit.attention.flash_triton import flash_triton, flash_triton_joined, heads_of
from lmkit.kernels.rope import rope_
from lmkit.model.operations import PLAIN

pytestmark = pytest.mark.interpreter


def projection(heads=4, kv_heads=2, head_dim=16, seq=20):
    torch.manual_seed(0)
    qkv = torch.randn(2, seq, (heads + 2 * kv_heads) * head_dim, requires_grad=True)
    return qkv, torch.randn(2, seq, heads * head_dim)


@pytest.mark.parametrize("kv_heads", full_but([2], [4, 2, 1]))
def test_equals_attention_on_parts(kv_heads):
    qkv, dout = projection(kv_heads=kv_heads)
    apart = flash_triton(*heads_of(qkv, kv_heads, 16), causal=True).transpose(1, 2).flatten(2)
    expected = torch.autograd.grad(apart, qkv, dout)[0]
    wide = torch.nn.functional.pad(qkv.detach(), (3, 5))[
        ..., 3:-5
    ].requires_grad_()  # with a gap between rows
    for joint in (qkv, wide):
        out = flash_triton_joined(joint, kv_heads=kv_heads, head_dim=16)
        (gradient,) = torch.autograd.grad(out, joint, dout)
        assert torch.equal(out, apart)
        assert torch.equal(gradient, expected)


def test_rope_and_attention_reuse_one_array():
    """As the model runs them: the gradient of the projection is written once and turned back in place."""
    qkv, dout = projection()
    table = torch.rand(20, 8, 2)
    turned = rope_(qkv * 1, table, 2, reuse_grad=True)
    out = flash_triton_joined(turned, kv_heads=2, head_dim=16)
    apart = PLAIN.rotated(qkv, table, 2, joined=False)
    plain = flash_triton(*apart, causal=True).transpose(1, 2).flatten(2)
    torch.testing.assert_close(out, plain)
    for mine, other in zip(*(torch.autograd.grad(x, qkv, dout) for x in (out, plain)), strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.full
def test_compiled_and_empty():
    qkv, dout = projection()
    compiled = torch.compile(flash_triton_joined, backend="aot_eager", fullgraph=True)
    runs = []
    for function in (flash_triton_joined, compiled):
        out = function(qkv, kv_heads=2, head_dim=16)
        runs.append((out, *torch.autograd.grad(out, qkv, dout)))
    for mine, other in zip(*runs, strict=True):
        torch.testing.assert_close(mine, other)
    assert flash_triton_joined(qkv[:, :0], kv_heads=2, head_dim=16).shape == (2, 0, 64)


def test_a_second_derivative_is_refused():
    qkv, dout = projection()
    out = flash_triton_joined(qkv, kv_heads=2, head_dim=16)
    (gradient,) = torch.autograd.grad(out, qkv, dout, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        gradient.sum().backward()
