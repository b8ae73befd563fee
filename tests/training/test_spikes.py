"""The guard against spikes of loss and gradient."""

import math

import pytest
import torch
from run_folders import CONFIG

from lmkit.parallel.ranks import Ranks
from lmkit.training.setup import build_step
from lmkit.training.step import SpikeGuard

FALSE = torch.tensor(False)


def told(guard: SpikeGuard, loss: float, norm: float, bad: torch.Tensor = FALSE) -> bool:
    return bool(guard.judge(torch.tensor(loss), torch.tensor(norm), bad))


def test_a_spike_is_far_above_the_good_steps_and_is_not_learnt():
    guard = SpikeGuard(6.0)
    torch.manual_seed(0)
    seen = []
    for number in range(200):
        loss, norm = (3 + 0.1 * torch.randn(2)).tolist()
        assert not told(guard, loss - number / 100, norm)  # it falls: that is no spike
        seen.append(norm)
    before = guard.state.clone()
    assert told(guard, 9.0, 3.0)
    assert told(guard, 1.0, 5.0)
    assert not told(guard, math.nan, 3.0, bad=~FALSE)
    assert torch.equal(guard.state, before)
    assert not told(guard, -50.0, 0.01)
    mean = sum(seen[-100:]) / 100
    assert before[3] == pytest.approx(mean, abs=0.05)
    assert before[4] == pytest.approx(0.01, rel=0.5)  # of 100 samples


def test_a_step_that_spikes_changes_nothing_and_stops_the_run_in_the_end():
    torch.manual_seed(0)
    step = build_step(CONFIG, Ranks(), max_skips=2, spike_sigmas=8.0)
    usual, strange = torch.randint(64, (2, 1, 4, 9))
    for _ in range(60):
        assert step(usual[..., :-1], usual[..., 1:], lr=1e-2).applied
    before = [weight.detach().clone() for weight in step.model.parameters()]
    for _ in range(2):
        outcome = step(strange[..., :-1], strange[..., 1:], lr=1e-2)
        assert (outcome.applied, outcome.nonfinite) == (False, True)
    assert all(torch.equal(one, two) for one, two in zip(before, step.model.parameters(), strict=True))
    assert step(usual[..., :-1], usual[..., 1:], lr=1e-2).applied
    assert int(step.skipped) == 0
