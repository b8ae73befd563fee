from __future__ import annotations

import math

import pytest
import torch

from lmkit.model.transformer import TransformerLM
from lmkit.optim.adamw import AdamW
from lmkit.parallel.process_group import Ranks
from lmkit.parallel.strategies import build_strategy
from lmkit.recipe.model import ModelConfig
from lmkit.training.loss_scale import GROWTH_INTERVAL, INITIAL, LossScale
from lmkit.training.step import Step

CONFIG = ModelConfig(vocab_size=64, context_length=8, d_model=16, d_ff=32, num_layers=1, num_heads=2)


class Job:
    """A model, its optimizer and its step, in float64 so that order of summation hardly matters."""

    def __init__(self, *, grad_clip: float = 0.0) -> None:
        torch.manual_seed(5)
        self.model = TransformerLM(CONFIG, dtype=torch.float64)
        sync = build_strategy("none", Ranks())
        call = sync.attach(self.model)
        self.optimizer = sync.build_optimizer(AdamW, [{"params": list(self.model.parameters())}])
        self.step = Step(
            call,  # type: ignore[arg-type]
            self.optimizer,
            sync,
            Ranks(),
            precision="fp32",
            grad_clip=grad_clip,
        )

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}


def make_batch(accumulation: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    ids = torch.randint(64, (2, 8, 8), generator=generator)  # inputs and targets, (rows, seq)
    inputs, targets = ids.view(2, accumulation, 8 // accumulation, 8)
    return inputs, targets


def test_accumulation_gives_the_gradient_of_the_whole_batch() -> None:
    whole, parts = Job(), Job()
    expected = whole.model.loss(*(tensor[0] for tensor in make_batch(1)))
    expected.backward()
    loss = parts.step.accumulate(*make_batch(4))
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)  # the mean is kept in float32
    for (name, left), right in zip(whole.model.named_parameters(), parts.model.parameters(), strict=True):
        # float64: only the order of the sums differs
        torch.testing.assert_close(left.grad, right.grad, rtol=1e-9, atol=1e-12, msg=name)


def update(job: Job, loss: torch.Tensor, **options):
    events: list[str] = []
    outcome = job.step.update(
        loss, **{"lr": 0.01, "stop": False, "before_update": lambda: events.append("released"), **options}
    )
    return outcome, events


def test_an_update_moves_the_weights_and_drops_the_gradients() -> None:
    job = Job()
    before = job.weights()
    outcome, events = update(job, job.step.accumulate(*make_batch(2)))
    assert outcome.applied
    assert not outcome.nonfinite
    assert events == ["released"]
    assert any(not torch.equal(value, before[name]) for name, value in job.weights().items())
    assert all(parameter.grad is None for parameter in job.model.parameters())
    assert job.optimizer.param_groups[0]["lr"] == 0.01


def test_clipping_reports_the_norm_before_it() -> None:
    free, clipped = Job(), Job(grad_clip=1e-3)
    norms = [update(job, job.step.accumulate(*make_batch(2)))[0].grad_norm.item() for job in (free, clipped)]
    assert norms[0] == pytest.approx(norms[1])
    assert norms[0] > 1e-2


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_fault_66_a_loss_that_is_not_finite_leaves_weights_and_optimizer_untouched(value: float) -> None:
    job = Job()
    update(job, job.step.accumulate(*make_batch(2)))
    before, moments = job.weights(), [dict(state) for state in job.optimizer.state.values()]
    moments = [{key: item.clone() for key, item in state.items()} for state in moments]
    loss = job.step.accumulate(*make_batch(2))
    outcome, events = update(job, loss * value)
    assert (outcome.applied, outcome.nonfinite) == (False, True)
    assert events == []
    for name, weight in job.weights().items():
        assert torch.equal(weight, before[name])
    for state, expected in zip(job.optimizer.state.values(), moments, strict=True):
        assert all(torch.equal(state[key], expected[key]) for key in expected)
    assert all(parameter.grad is None for parameter in job.model.parameters())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_fault_67_a_gradient_that_is_not_finite_leaves_the_weights_untouched(value: float) -> None:
    job = Job(grad_clip=1.0)
    before = job.weights()
    loss = job.step.accumulate(*make_batch(2))
    gradient = job.model.ln_final.weight.grad
    assert gradient is not None
    gradient[3] = value
    outcome, _ = update(job, loss)
    assert (outcome.applied, outcome.nonfinite) == (False, True)
    assert all(torch.equal(weight, before[name]) for name, weight in job.weights().items())


def test_a_wish_to_stop_comes_back_and_the_step_is_still_made() -> None:
    job = Job()
    outcome, _ = update(job, job.step.accumulate(*make_batch(2)), stop=True)
    assert outcome.stop
    assert outcome.applied


def test_loss_scale_halves_on_overflow_grows_after_long_and_gives_up_at_one() -> None:
    scale = LossScale()
    assert scale.shrink()
    assert scale.scale == INITIAL / 2
    for _ in range(GROWTH_INTERVAL):
        scale.keep()
    assert scale.scale == INITIAL
    halvings = 0
    while scale.shrink():
        halvings += 1
    assert halvings == 16
    assert scale.scale == 1.0
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([2.0, 4.0, 8.0])
    scale.scale = 4.0
    scale.unscale_([parameter, torch.nn.Parameter(torch.zeros(1))])
    assert parameter.grad.tolist() == [0.5, 1.0, 2.0]
    restored = LossScale()
    restored.restore(scale.state())
    assert restored.state() == scale.state()
