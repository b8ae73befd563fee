"""Clipping against PyTorch's."""

import pytest
import torch

from lmkit.optim import AdamW, clip_for, clip_gradients, gradient_norm


def parameters(scale: float, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in [(5, 3), (7,), (2, 2), (4,)]]
    for param in params[:-1]:
        param.grad = torch.randn(param.shape).to(dtype) * scale
    return params


@pytest.mark.parametrize(
    ("scale", "max_norm"), [(0.01, 1.5), (1.0, 1.5), (1e4, 1.5), (1e-6, 1e-6), (0.0, 1.0)]
)
def test_equals_torch(scale, max_norm):
    ours, theirs = parameters(scale), parameters(scale)
    norm = clip_gradients(ours, max_norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)  # float32, other order of sums
    for mine, yours in zip(ours[:-1], theirs[:-1], strict=True):
        torch.testing.assert_close(mine.grad, yours.grad, rtol=1e-6, atol=0)  # scaled by that norm
    assert ours[-1].grad is None


def test_the_norm_of_bfloat16_is_summed_in_float32():
    params = parameters(1.0, torch.bfloat16)
    exact = torch.cat([param.grad.double().flatten() for param in params[:-1]]).norm()
    norm = clip_gradients(params, 1e9)
    assert norm.dtype == torch.float32
    # Rounding of float32 sums; sums in bfloat16 would be off by percents.
    assert norm.item() == pytest.approx(exact.item(), rel=1e-6)


def test_gradients_of_several_dtypes_have_one_norm():
    single, double = torch.randn(5), torch.randn(7, dtype=torch.float64)
    expected = torch.cat([single.double(), double]).norm()
    for grads in ([single.clone(), double.clone()], [double.clone(), single.clone()]):
        norm = gradient_norm(grads)
        assert norm.item() == pytest.approx(expected.item(), rel=1e-12)  # in float64 all the way
        clip_for(None, grads, norm, 0.5)
        assert gradient_norm(grads).item() == pytest.approx(0.5, rel=1e-5)  # 1e-6 is added to the norm
        assert {grad.dtype for grad in grads} == {torch.float32, torch.float64}


@pytest.mark.parametrize("worst", [0.5, float("inf")])
def test_infinity_measures_only(worst):
    """A factor of inf / inf would spoil the other gradients."""
    params = parameters(1.0)
    params[0].grad[1, 1] = worst
    grads = [param.grad for param in params[:-1]]
    before = [grad.clone() for grad in grads]
    assert clip_gradients(params, float("inf")) > 1
    optimizer = AdamW(params)
    clip_for(optimizer, grads, gradient_norm(grads), float("inf"))
    assert all(torch.equal(grad, value) for grad, value in zip(grads, before, strict=True))
    assert optimizer.gradient_factor is None


def test_nothing_to_clip_is_harmless():
    assert clip_gradients([], 1.0).item() == 0.0


@pytest.mark.parametrize("max_norm", [1e-3, 1e9, float("inf")])
def test_our_adamw_clips_as_it_reads(max_norm):
    """The same step as after scaling in place; SGD, and who has no optimizer, has its gradients scaled."""
    ours, theirs = parameters(1.0), parameters(1.0)
    mine, other = AdamW(ours), AdamW(theirs)
    grads = [param.grad for param in ours if param.grad is not None]
    kept = [grad.clone() for grad in grads]
    clip_for(mine, grads, gradient_norm(grads), max_norm)
    assert all(torch.equal(grad, before) for grad, before in zip(grads, kept, strict=True))
    clip_gradients(theirs, max_norm)
    mine.step()
    other.step()
    assert all(torch.equal(param, twin) for param, twin in zip(ours, theirs, strict=True))
    for optimizer in (torch.optim.SGD(ours, lr=0.1), None):
        scaled = [grad.clone() for grad in kept]
        clip_for(optimizer, scaled, gradient_norm(scaled), max_norm)
        assert all(torch.equal(grad, param.grad) for grad, param in zip(scaled, theirs[:-1], strict=True))
