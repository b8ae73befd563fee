"""RMSNorm against the formula in float64, by hand and fused."""

import pytest
import torch
from torch.nn import functional as F

from lmkit.model.layers import RMSNorm


def formula(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight


@pytest.mark.parametrize("shape", [(7, 16), (2, 3, 40), (1, 1, 2), (16,)])
def test_value_and_gradients_follow_the_formula(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    norm = RMSNorm(shape[-1], eps=0.1, dtype=torch.float64)  # a large eps, so that its place matters
    with torch.no_grad():
        norm.weight.normal_()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    out_grad = torch.randn(shape, dtype=torch.float64)

    ours = torch.autograd.grad(norm(x), (x, norm.weight), out_grad)
    theirs = torch.autograd.grad(formula(x, norm.weight, 0.1), (x, norm.weight), out_grad)

    # float64: nothing but the order of a few sums differs.
    torch.testing.assert_close(norm(x), formula(x, norm.weight, 0.1), rtol=1e-13, atol=1e-13)
    for mine, yours in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, yours, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", ["mixed dtypes", "compiled"])
def test_the_other_ways_have_the_same_eps(how: str) -> None:
    torch.manual_seed(0)
    dtype = torch.float32 if how == "mixed dtypes" else torch.float64
    norm = RMSNorm(16, eps=0.1, dtype=dtype)
    layer = norm if how == "mixed dtypes" else torch.compile(norm, backend="eager", fullgraph=True)
    x = torch.randn(7, 16, dtype=torch.float64)
    # float64, but for the gains of one that are cast.
    torch.testing.assert_close(layer(x), formula(x, norm.weight.double(), 0.1), rtol=1e-12, atol=0)


def test_bfloat16_is_computed_in_float32() -> None:
    torch.manual_seed(0)
    norm = RMSNorm(512, eps=1e-5)
    x = (torch.randn(64, 512) * 100).bfloat16()
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
        norm.weight.copy_(norm.weight.bfloat16())
    for layer in (norm, RMSNorm(512, eps=1e-5, dtype=torch.bfloat16)):
        layer.load_state_dict(norm.state_dict())
        out = layer(x)
        exact = formula(x.double(), norm.weight.double(), 1e-5)
        assert out.dtype == torch.bfloat16
        # Rounding the result to 8 bits once or twice (2^-9 each); sums in bfloat16 would be off by percents.
        torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=0)


def test_the_fused_path_agrees_with_ours() -> None:
    torch.manual_seed(0)
    norm = RMSNorm(48)
    x = torch.randn(5, 48)
    # float32 with different order of summation.
    torch.testing.assert_close(norm(x), F.rms_norm(x, (48,), norm.weight, 1e-5), rtol=1e-5, atol=1e-6)
