"""Cross-entropy against PyTorch's; the sliced one against logits held all at once."""

import math

import pytest
import torch
from torch.nn import functional as F

from lmkit.core import loss as loss_module
from lmkit.core.loss import SliceLoss, cross_entropy, linear_cross_entropy


@pytest.fixture(params=[1, 64, 1 << 20], ids=["one token a slice", "some tokens", "all at once"])
def slice_elements(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loss_module.SLICE_ELEMENTS, "cpu", request.param)


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(3, 7, 12, dtype=dtype, requires_grad=True)
    weight = torch.randn(11, 12, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(11, (3, 7))


@pytest.mark.parametrize("shape", [(), (5,), (2, 3)], ids=str)
@pytest.mark.parametrize("factor", [1.0, 1000.0])  # exp(1000) overflows
def test_cross_entropy_equals_torchs(shape, factor):
    torch.manual_seed(0)
    logits = (torch.randn(*shape, 11) * factor).requires_grad_()
    targets = torch.randint(11, shape)
    ours = cross_entropy(logits, targets)
    theirs = F.cross_entropy(logits.reshape(-1, 11), targets.reshape(-1))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)  # float32 rounding
    pair = [torch.autograd.grad(loss, logits)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("slice_elements")
@pytest.mark.parametrize(("form", "masked"), [("eager", False), ("eager", True), ("compiled", True)])
def test_value_and_gradients_equal_the_plain_way_also_where_targets_below_zero_do_not_count(form, masked):
    hidden, weight, targets = inputs(torch.float64)
    if masked:
        targets[0, :4] = targets[2] = -1
    slice_loss = SliceLoss()
    if form == "compiled":
        slice_loss.compile(backend="eager")
    ours = linear_cross_entropy(hidden, weight, targets, slice_loss=slice_loss)
    logits = (hidden @ weight.T).flatten(0, 1)
    theirs = F.cross_entropy(logits, targets.flatten(), ignore_index=-1)
    for mine in (ours, cross_entropy(logits, targets.flatten())):
        # float64: the order of sums alone differs.
        torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=0)
    # A factor behind the loss, as accumulation and loss scaling put it there.
    pair = (torch.autograd.grad(loss * 3.5, (hidden, weight)) for loss in (ours, theirs))
    for one, other in zip(*pair, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    none = linear_cross_entropy(hidden, weight, torch.full_like(targets, -1), slice_loss=slice_loss)
    assert none.item() == 0
    assert not any(grad.any() for grad in torch.autograd.grad(none, (hidden, weight)))


def test_a_single_token_needs_no_other_axis():
    hidden, weight, targets = inputs(torch.float64)
    alone = linear_cross_entropy(hidden[0, 0], weight, targets[0, 0])
    in_a_batch = linear_cross_entropy(hidden[:1, :1], weight, targets[:1, :1])
    assert torch.equal(alone, in_a_batch)
    pairs = zip(*(torch.autograd.grad(x, (hidden, weight)) for x in (alone, in_a_batch)), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_the_sum_over_many_slices_loses_nothing_in_bfloat16(monkeypatch):
    """1024 slices of one token: a bfloat16 sum would stand still once it is 256 times what is added."""
    monkeypatch.setitem(loss_module.SLICE_ELEMENTS, "cpu", 1)
    hidden = torch.ones(1024, 2)
    weight = torch.zeros(3, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, torch.zeros(1024, dtype=torch.int64))
    loss.backward()
    # ln 3; 1024 roundings of a float32, all in one direction at worst.
    assert loss.item() == pytest.approx(1.0986123, rel=1024 * 2**-24)
    # 1/3 - 1 and 1/3 in bfloat16, 2^-9 off.
    expected = torch.tensor([[-2 / 3], [1 / 3], [1 / 3]]).expand(3, 2)
    torch.testing.assert_close(weight.grad, expected, rtol=2**-8, atol=0)


@pytest.mark.usefixtures("slice_elements")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_keeps_loss_and_sums_in_float32(dtype):
    hidden, weight, targets = inputs(torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        ours = linear_cross_entropy(hidden, weight, targets)
    exact = F.cross_entropy((hidden.double() @ weight.double().T).flatten(0, 1), targets.flatten())
    mine = torch.autograd.grad(ours, (hidden, weight))
    yours = torch.autograd.grad(exact, (hidden, weight))
    assert ours.dtype == torch.float32
    assert [grad.dtype for grad in mine] == [torch.float32, torch.float32]
    # Budget: what the plain way loses in this dtype, twice over.
    with torch.autocast("cpu", dtype=dtype):
        plain = F.cross_entropy((hidden @ weight.T).flatten(0, 1).float(), targets.flatten())
    theirs = torch.autograd.grad(plain, (hidden, weight))
    for got, rival, truth in zip((ours, *mine), (plain, *theirs), (exact, *yours), strict=True):
        budget = 2 * (rival.double() - truth).abs().max() + 1e-3 * truth.abs().max()
        assert (got.double() - truth).abs().max() <= budget


@pytest.mark.parametrize("tokens", [1, 4096])
def test_a_confident_float16_model_keeps_its_gradients(tokens):
    """Inside float16, 1 / tokens would push them below the smallest number before the loss scale lifts them, and the
    loss scale itself is beyond the largest."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, 8, requires_grad=True)
    weight = (torch.randn(64, 8) * 0.01).requires_grad_()
    targets = torch.randint(64, (tokens,))
    with torch.autocast("cpu", dtype=torch.float16):
        loss = linear_cross_entropy(hidden, weight, targets)
    (ours,) = torch.autograd.grad(loss * 65536.0, hidden)
    exact = F.cross_entropy(hidden.double() @ weight.double().T, targets)
    (truth,) = torch.autograd.grad(exact * 65536.0, hidden)
    # float16 has 11 bits; a sum over 64 terms of mixed sign loses two or three more.
    assert (ours.double() - truth).norm() <= 2**-8 * truth.norm()


def test_certain_and_hopeless_predictions_stay_finite():
    hidden = torch.tensor([[1000.0], [-1000.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]])
    loss = linear_cross_entropy(hidden, weight, torch.tensor([0, 0]))
    assert loss.item() == 1000.0  # (0 + 2000) / 2
    (grad,) = torch.autograd.grad(loss, hidden)
    assert grad.tolist() == [[0.0], [-1.0]]


def test_without_gradients_the_only_product_is_that_of_the_logits():
    """Evaluation would pay for the head's gradient otherwise: `ctx.needs_input_grad` is true under no_grad too."""
    weight = torch.nn.Parameter(torch.randn(10, 8))
    hidden, targets = torch.randn(6, 8), torch.randint(10, (6,))

    def products(enable: bool, *, frozen: bool = False) -> list[str]:
        weight.requires_grad_(not frozen)
        with (
            torch.set_grad_enabled(enable),
            torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
            ) as profiler,
        ):
            linear_cross_entropy(hidden.requires_grad_(enable), weight, targets)
        return sorted(event.name for event in profiler.events() if event.name in ("aten::mm", "aten::addmm_"))

    assert products(False) == ["aten::mm"]
    assert products(True) == ["aten::addmm_", "aten::mm", "aten::mm"]
    assert products(True, frozen=True) == ["aten::mm", "aten::mm"]
    assert products(False, frozen=True) == ["aten::mm"]


def test_a_token_that_does_not_count_may_have_an_infinite_loss():
    """Its target is taken for id 0, which the model may exclude."""
    logits, targets = torch.randn(2, 10), torch.tensor([3, -100])
    logits[:, 0] = -math.inf
    wanted = torch.nn.functional.cross_entropy(logits, targets)
    torch.testing.assert_close(cross_entropy(logits, targets), wanted)
    weight = torch.cat([torch.full((1, 2), -math.inf), torch.randn(9, 2)])
    hidden = torch.rand(2, 2)
    wanted = torch.nn.functional.cross_entropy(hidden @ weight.T, targets)
    torch.testing.assert_close(linear_cross_entropy(hidden, weight, targets), wanted)
