"""AdamW against PyTorch's over recorded gradients, against the formula, and its state."""

from __future__ import annotations

import copy
import io

import pytest
import torch

from lmkit.optim import adamw as adamw_module
from lmkit.optim.adamw import AdamW, decay_groups

SHAPES = [(7, 5), (40,), (3, 4, 2), (1,)]
SETTINGS = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def recorded(steps: int) -> list[list[torch.Tensor]]:
    """Gradients of sizes from 1e-6 to 10, some entries zero."""
    torch.manual_seed(0)
    return [
        [torch.randn(shape) * 10 ** (torch.rand(()) * 7 - 6) * (torch.rand(shape) > 0.1) for shape in SHAPES]
        for _ in range(steps)
    ]


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    torch.manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]


def run(optimizer: torch.optim.Optimizer, gradients: list[list[torch.Tensor]]) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for step, grads in enumerate(gradients):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 + step % 7)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.to(param.dtype)
        optimizer.step()


@pytest.mark.parametrize("sweep", [1, 30, 1 << 20])
def test_equals_torch_over_a_thousand_steps(sweep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(adamw_module.SWEEP_ELEMENTS, "cpu", sweep)
    ours, theirs = parameters(), parameters()
    gradients = recorded(1000)
    run(AdamW(ours, **SETTINGS), gradients)
    run(torch.optim.AdamW(theirs, **SETTINGS), gradients)
    for mine, yours, start in zip(ours, theirs, parameters(), strict=True):
        assert (mine - start).abs().max() > 0.1  # they have moved
        torch.testing.assert_close(mine, yours, rtol=1e-6, atol=1e-6)  # the promise


def test_equals_the_formula_in_float64() -> None:
    params = parameters(torch.float64)
    gradients = recorded(20)
    optimizer = AdamW(params, lr=0.01, betas=(0.8, 0.99), eps=1e-3, weight_decay=0.3)
    expected = [param.detach().clone() for param in params]
    m, v = [torch.zeros_like(w) for w in expected], [torch.zeros_like(w) for w in expected]
    for t, grads in enumerate(gradients, start=1):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.double()
        optimizer.step()
        for i, grad in enumerate(grads):
            g = grad.double()
            m[i] = 0.8 * m[i] + 0.2 * g
            v[i] = 0.99 * v[i] + 0.01 * g**2
            update = (m[i] / (1 - 0.8**t)) / ((v[i] / (1 - 0.99**t)).sqrt() + 1e-3)
            expected[i] = expected[i] - 0.01 * 0.3 * expected[i] - 0.01 * update
    for param, w in zip(params, expected, strict=True):
        torch.testing.assert_close(param.detach(), w, rtol=1e-12, atol=1e-13)  # float64 rounding of 20 steps


def test_state_survives_a_file_bit_for_bit() -> None:
    gradients = recorded(20)
    whole, halves = parameters(), parameters()
    run(AdamW(whole, **SETTINGS), gradients)

    first = AdamW(halves, **SETTINGS)
    run(first, gradients[:7])
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = AdamW(halves, lr=9.0, weight_decay=9.0)
    second.load_state_dict(torch.load(file))
    for step, grads in enumerate(gradients[7:], start=7):
        for group in second.param_groups:
            group["lr"] = 3e-3 * (1 + step % 7)
        for param, grad in zip(halves, grads, strict=True):
            param.grad = grad
        second.step()
    for one, two in zip(whole, halves, strict=True):
        assert torch.equal(one, two)


def test_state_has_torchs_names_and_loads_both_ways() -> None:
    gradients = recorded(5)
    ours, theirs = parameters(), parameters()
    mine, yours = AdamW(ours, **SETTINGS), torch.optim.AdamW(theirs, **SETTINGS)
    run(mine, gradients)
    run(yours, gradients)
    assert {name: value.dtype for name, value in mine.state[ours[0]].items()} == {
        name: value.dtype for name, value in yours.state[theirs[0]].items()
    }
    states = copy.deepcopy(mine.state_dict()["state"]), copy.deepcopy(yours.state_dict()["state"])
    mine.load_state_dict({**mine.state_dict(), "state": states[1]})
    yours.load_state_dict({**yours.state_dict(), "state": states[0]})
    run(mine, gradients)
    run(yours, gradients)
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)  # the promise, as above


def test_parameters_without_gradient_stay_and_count_their_own_steps() -> None:
    ours, theirs = parameters(), parameters()
    mine, yours = AdamW(ours, **SETTINGS), torch.optim.AdamW(theirs, **SETTINGS)
    for step, grads in enumerate(recorded(9)):
        for params in (ours, theirs):
            for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
                param.grad = grad.clone() if i == 0 or (step + i) % 3 else None
        mine.step()
        yours.step()
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)  # the promise, as above
    assert int(mine.state[ours[0]]["step"]) == 9
    assert int(mine.state[ours[1]]["step"]) == 6


def test_mixed_dtypes_and_a_closure() -> None:
    params = [torch.nn.Parameter(torch.ones(4, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
    optimizer = AdamW(params, lr=0.1, weight_decay=0.0)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum(param.float().square().sum() for param in params)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 8.0
    for param in params:
        # The first step of Adam moves each weight by lr, whatever its gradient; bf16 rounds 0.9 by up to 2^-9.
        torch.testing.assert_close(param.detach().float(), torch.full((4,), 0.9), rtol=2**-8, atol=0)


def test_a_factor_counts_until_the_gradients_are_dropped() -> None:
    ours, theirs = parameters(), parameters()
    mine, other = AdamW(ours, **SETTINGS), AdamW(theirs, **SETTINGS)
    for grads, factor in zip(recorded(4), (0.25, None, 3.0, 1e-3), strict=True):
        mine.gradient_factor = None if factor is None else torch.tensor(factor)
        for param, twin, grad in zip(ours, theirs, grads, strict=True):
            param.grad = grad.clone()
            twin.grad = grad * (1.0 if factor is None else factor)
        mine.step()
        other.step()
        assert all(torch.equal(param.grad, grad) for param, grad in zip(ours, grads, strict=True))
        mine.zero_grad()
        assert mine.gradient_factor is None
    assert all(torch.equal(param, twin) for param, twin in zip(ours, theirs, strict=True))


def test_bf16_gradients_and_copies_of_float32_parameters() -> None:
    ours, theirs = parameters(), parameters()
    mine, other = AdamW(ours, **SETTINGS), AdamW(theirs, **SETTINGS)
    mine.copies = {param: torch.zeros_like(param, dtype=torch.bfloat16) for param in ours[1:]}
    for grads in recorded(3):
        for param, twin, grad in zip(ours, theirs, grads, strict=True):
            param.grad_dtype = None
            param.grad = grad.bfloat16()
            twin.grad = param.grad.float()
        mine.step()
        other.step()
    assert all(torch.equal(param, twin) for param, twin in zip(ours, theirs, strict=True))
    assert all(torch.equal(copied, param.bfloat16()) for param, copied in mine.copies.items())


def test_a_copy_of_the_optimizer_steps_its_own_parameters() -> None:
    params = parameters()
    first = AdamW(params, **SETTINGS)
    run(first, recorded(3))
    second = copy.deepcopy(first)
    before = [param.detach().clone() for param in params]
    run(second, recorded(4)[3:])
    assert all(torch.equal(param, value) for param, value in zip(params, before, strict=True))
    run(first, recorded(4)[3:])
    for mine, yours in zip(params, second.param_groups[0]["params"], strict=True):
        assert torch.equal(mine, yours)


def test_decay_groups_are_matrices_and_vectors() -> None:
    params = parameters()
    params[2].requires_grad_(False)
    matrices, vectors = decay_groups(params, 0.1)
    assert [tuple(param.shape) for param in matrices["params"]] == [(7, 5)]
    assert [tuple(param.shape) for param in vectors["params"]] == [(40,), (1,)]
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert len(decay_groups(params[:1], 0.1)) == 1


@pytest.mark.parametrize(
    "settings",
    [{"lr": -1.0}, {"lr": float("nan")}, {"betas": (1.0, 0.9)}, {"eps": 0.0}, {"weight_decay": -0.1}],
    ids=str,
)
def test_settings_out_of_range_are_refused(settings: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        AdamW(parameters(), **settings)
