"""Layers against their formulas, by hand and fused."""

import pytest
import torch

from lmkit.model import RMSNorm


def formula(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight


@pytest.mark.parametrize("shape", [(7, 16), (2, 3, 40), (1, 1, 2), (16,)])
def test_rms_norm_and_its_gradients_follow_the_formula(shape):
    torch.manual_seed(0)
    norm = RMSNorm(shape[-1], eps=0.1, dtype=torch.float64)  # a large eps, so that its place matters
    with torch.no_grad():
        norm.weight.normal_()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    out_grad = torch.randn(shape, dtype=torch.float64)
    ours = torch.autograd.grad(norm(x), (x, norm.weight), out_grad)
    theirs = torch.autograd.grad(formula(x, norm.weight, 0.1), (x, norm.weight), out_grad)
    # float64: only the order of a few sums differs.
    torch.testing.assert_close(norm(x), formula(x, norm.weight, 0.1), rtol=1e-13, atol=1e-13)
    for mine, yours in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, yours, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", ["mixed dtypes", "compiled"])
def test_rms_norm_by_other_ways_has_the_same_eps(how):
    torch.manual_seed(0)
    dtype = torch.float32 if how == "mixed dtypes" else torch.float64
    norm = RMSNorm(16, eps=0.1, dtype=dtype)
    layer = norm if how == "mixed dtypes" else torch.compile(norm, backend="eager", fullgraph=True)
    x = torch.randn(7, 16, dtype=torch.float64)
    # float64, but for the gains of one that are cast.
    torch.testing.assert_close(layer(x), formula(x, norm.weight.double(), 0.1), rtol=1e-12, atol=0)


def test_rms_norm_computes_bfloat16_in_float32():
    torch.manual_seed(0)
    norm = RMSNorm(512)
    x = (torch.randn(64, 512) * 100).bfloat16()
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
        norm.weight.copy_(norm.weight.bfloat16())
    for layer in (norm, RMSNorm(512, dtype=torch.bfloat16)):
        layer.load_state_dict(norm.state_dict())
        out = layer(x)
        exact = formula(x.double(), norm.weight.double(), 1e-5)
        assert out.dtype == torch.bfloat16
        # Rounding the result to 8 bits once or twice (2^-9 each); sums in bfloat16 would be off by percents.
        torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=0)
