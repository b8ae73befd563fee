"""Products in fp8, simulated on a CPU: errors of 3 bits of mantissa, only where a product is computed in fp8."""

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton", reason="the casts need Triton")

from lmkit.kernels.fp8 import E4M3, plain_cast_rows, plain_cast_transposed
from lmkit.model import fp8
from lmkit.model.fp8 import fp8_linear, suits_fp8, use_fp8


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def error(got, exact):
    return float((got.double() - exact).norm() / exact.norm())


def test_rows_have_scales_of_their_own():
    x = draw(6, 32)
    x[1] *= 1e-6
    x[4] *= 1e-37  # 448 / 1e-37 is infinite
    x[2] = 0
    x[3, 7] = 3e5
    low, scale = plain_cast_rows(x)
    assert low.dtype == E4M3
    assert scale.shape == (6, 1)
    back = low.float() * scale
    assert torch.equal(back[2], torch.zeros(32))
    largest = x.float().abs().amax(1)
    tiny = torch.arange(6) == 4
    # 448 is a number of e4m3; the scale of tiny numbers is larger.
    torch.testing.assert_close(back.abs().amax(1)[~tiny], largest[~tiny], rtol=1e-6, atol=0)
    torch.testing.assert_close(back[tiny], x[tiny].float(), rtol=1 / 16, atol=2.0**-136)
    # Half a unit of 3 bits of mantissa, or of the smallest number, 2^-9 of a scale of largest / 448.
    assert ((back - x.float()).abs() <= x.float().abs() / 16 + largest[:, None] / 448 / 1024)[~tiny].all()


def test_a_matrix_is_transposed():
    w = draw(48, 32)
    scale = w.float().abs().max() / 448
    low, scales = plain_cast_transposed(w, scale)
    assert low.shape == (32, 48)
    assert low.is_contiguous()
    assert torch.equal(scales, scale.expand(1, 32))
    torch.testing.assert_close(low.float() * scale, w.float().t(), rtol=1 / 16, atol=float(scale) / 1024)


@pytest.mark.parametrize("with_bias", [False, True])
def test_products_and_gradients(with_bias):
    x, w, dy = draw(2, 40, 64), draw(96, 64, seed=1), draw(2, 40, 96, seed=2)
    bias = draw(96, seed=3) if with_bias else None
    leaves = [each.clone().requires_grad_() for each in (x, w, *([bias] if with_bias else []))]
    out = fp8_linear(*leaves)
    got = [out, *torch.autograd.grad(out, leaves, dy)]
    exact_leaves = [each.detach().double().requires_grad_() for each in leaves]
    exact = F.linear(*exact_leaves)
    wanted = [exact, *torch.autograd.grad(exact, exact_leaves, dy.double())]
    errors = [error(mine.detach(), theirs.detach()) for mine, theirs in zip(got, wanted, strict=True)]
    # Two factors with an error of 2^-4 / sqrt(3) / 1.4 each, of independent signs.
    assert all(0.01 < each < 0.05 for each in errors[:2])
    assert all(each < 0.004 for each in errors[2:])  # bf16
    assert all(mine.dtype == torch.bfloat16 for mine in got)


def test_passes_without_gradients_are_bf16():
    x, w = draw(3, 64), draw(32, 64, seed=1)
    with torch.no_grad():
        assert torch.equal(fp8_linear(x, w), F.linear(x, w))
    assert not torch.equal(fp8_linear(x, w.requires_grad_()), F.linear(x, w))


def test_infinities_and_nan_are_seen():
    for bad in (float("inf"), float("nan")):
        x = draw(3, 64)
        x[1, 5] = bad
        out = fp8_linear(x, draw(32, 64, seed=1).requires_grad_())
        assert torch.isnan(out[1]).all()
        assert torch.isfinite(out[[0, 2]]).all()


def test_layers_of_blocks_that_are_large_enough(make_model, monkeypatch):
    assert suits_fp8(2048, 1024)
    assert not suits_fp8(2048, 1008)
    assert not suits_fp8(2056, 2048)
    monkeypatch.setattr(fp8, "FP8_LEAST_WIDTH", 32)
    model = make_model(dtype=torch.bfloat16, d_ff=64)
    ids = torch.randint(61, (2, 16))
    exact = model.loss(ids, ids)
    model.loss(ids, ids).backward()
    before = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    assert use_fp8(model.layers) == 2 * 4
    assert all(block.ffn.casts for block in model.layers)
    assert model.lm_head.product is F.linear
    model.zero_grad()
    loss = model.loss(ids, ids)
    assert 0 < abs(loss.item() - exact.item()) < 0.02
    loss.backward()
    for name, parameter in model.named_parameters():
        assert 0 < error(parameter.grad, before[name].double()) < 0.2, name


def test_what_is_computed_again_is_the_same(make_model, monkeypatch):
    monkeypatch.setattr(fp8, "FP8_LEAST_WIDTH", 32)
    ids = torch.randint(61, (2, 16), generator=torch.Generator().manual_seed(0))
    gradients = []
    for keep in ("none", "block", "attention"):
        model = make_model(dtype=torch.bfloat16, d_ff=64, activation_checkpointing=keep)
        use_fp8(model.layers)
        model.loss(ids, ids).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for others in gradients[1:]:
        assert all(torch.equal(mine, other) for mine, other in zip(gradients[0], others, strict=True))


def test_casts_are_kept_only_between_products_in_fp8(make_model, monkeypatch):
    monkeypatch.setattr(fp8, "FP8_LEAST_WIDTH", 32)
    model = make_model(dtype=torch.bfloat16, d_ff=72)  # no multiple of 16
    assert use_fp8(model.layers) == 2 * 2 + 2  # gate and up have 144 rows
    for block in model.layers:
        assert not block.ffn.casts
