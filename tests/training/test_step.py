import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from run_folders import CONFIG

from lmkit.core.adamw import decay_groups
from lmkit.model.transformer import TransformerLM
from lmkit.optim.adamw import AdamW
from lmkit.parallel.ranks import Ranks
from lmkit.parallel.strategy import NoSync
from lmkit.recipe.tables import ParallelConfig
from lmkit.training.checkpoint import LossScaleState
from lmkit.training.precision import GROWTH_INTERVAL, INITIAL_SCALE, LossScale
from lmkit.training.step import Outcome, Step


class NotedSync(NoSync):
    """Synchronises nothing, and notes what it is asked."""

    def __init__(self) -> None:
        super().__init__(Ranks(), ParallelConfig())
        self.notes: list[str] = []

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.notes.append("no_sync")
        yield
        self.notes.append("sync")

    def finish(self, *, wait: bool = True) -> None:
        self.notes.append(f"finish, wait={wait}")


class Job:
    """A model, its optimizer and its step, in float64 so that order of summation hardly matters."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float64,
        optimizer: Callable[..., torch.optim.Optimizer] = AdamW,
        **options: Any,
    ) -> None:
        torch.manual_seed(5)
        self.model = TransformerLM(CONFIG, dtype=dtype)
        self.sync = NotedSync()
        call = self.sync.attach(self.model)
        self.optimizer = self.sync.build_optimizer(optimizer, decay_groups(self.model.parameters(), 0.1))
        options = {"precision": "fp32", "grad_clip": 0.0, **options}
        self.step = Step(self.model, call, self.optimizer, self.sync, Ranks(), **options)  # type: ignore[arg-type]

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}


def make_batch(accumulation: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    ids = torch.randint(64, (2, 12, 8), generator=generator)  # inputs and targets, (rows, seq)
    inputs, targets = ids.view(2, accumulation, 12 // accumulation, 8)
    return inputs, targets


def test_accumulation_gives_the_gradient_of_the_whole_batch():
    whole, parts = Job(), Job()
    expected = whole.model.loss(*(tensor[0] for tensor in make_batch(1)))
    expected.backward()
    loss = parts.step.accumulate(*make_batch(4))
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)  # the mean is kept in float32
    for (name, left), right in zip(whole.model.named_parameters(), parts.model.parameters(), strict=True):
        # float64: only the order of the sums differs
        torch.testing.assert_close(left.grad, right.grad, rtol=1e-9, atol=1e-12, msg=name)


def update(job: Job, loss: torch.Tensor) -> Outcome:
    return job.step.update(loss, lr=0.01)


def test_only_the_last_micro_batch_synchronises():
    job = Job()
    job.model.ln_final.register_forward_hook(lambda *_: job.sync.notes.append("forward"))
    update(job, job.step.accumulate(*make_batch(3)))
    assert job.sync.notes == ["no_sync", "forward", "sync"] * 2 + ["forward", "finish, wait=False"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_fault_67_a_gradient_that_is_not_finite_leaves_the_weights_untouched(value):
    job = Job(grad_clip=1.0)
    before = job.weights()
    loss = job.step.accumulate(*make_batch(2))
    gradient = job.model.ln_final.weight.grad
    gradient[3] = value
    outcome = update(job, loss)
    assert (outcome.applied, outcome.nonfinite) == (False, True)
    assert all(torch.equal(weight, before[name]) for name, weight in job.weights().items())


def test_a_flag_to_stop_comes_back_and_the_step_is_still_made():
    job = Job()
    for factor, applied in ((1, True), (math.nan, False)):
        job.step.signals, job.step.save_at = [15], 0.0
        outcome = update(job, job.step.accumulate(*make_batch(2)) * factor)
        assert (outcome.stop, outcome.save, outcome.applied) == (True, True, applied)
    job.step.signals, job.step.save_at = [], math.inf
    outcome = update(job, job.step.accumulate(*make_batch(2)))
    assert (outcome.stop, outcome.save) == (False, False)


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", None), ("bf16", None), ("bf16-autocast", torch.bfloat16), ("fp16", torch.float16)],
)
def test_products_run_in_the_precision_of_the_recipe(precision, dtype):
    job, seen = Job(precision=precision, dtype=torch.float32), []
    job.model.ln_final.register_forward_hook(
        lambda *_: seen.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None)
    )
    job.step.accumulate(*make_batch(2))
    assert seen == [dtype, dtype]


def test_fp16_trains_as_without_a_loss_scale():
    """Gradients are scaled while they are formed; norm, clipping and update see them as they are."""
    plain, scaled = Job(dtype=torch.float32), Job(dtype=torch.float32, precision="fp16")
    norms = []
    for job in (plain, scaled):
        loss = job.step.accumulate(*make_batch(2))
        if job is scaled:
            norm = torch.nn.utils.get_total_norm([p.grad for p in job.model.parameters()]).item()
            assert norm == pytest.approx(INITIAL_SCALE * norms[0], rel=0.02)  # 11 bits, a few roundings deep
        norms.append(update(job, loss).grad_norm.item())
    assert norms[1] == pytest.approx(norms[0], rel=0.02)
    assert scaled.sync.notes[-1] == "finish, wait=True"  # unscaling reads the gradients
    assert scaled.step.loss_scale.state().good_steps == 1
    before = Job(dtype=torch.float32).weights()
    for name, weight in plain.weights().items():
        # Adam's first step is lr times the gradient's sign: it differs where a gradient is next to nothing.
        moved, moved_too = weight - before[name], scaled.weights()[name] - before[name]
        assert (moved - moved_too).norm() < 0.1 * moved.norm(), name


def test_an_overflow_of_the_loss_scale_is_left_out_and_no_failure_until_it_cannot_shrink():
    job = Job(dtype=torch.float32, precision="fp16")
    before, scale = job.weights(), job.step.loss_scale
    outcomes = []
    for value in (4.0, 2.0, 1.0):
        scale.restore(LossScaleState(scale=value, good_steps=0))
        loss = job.step.accumulate(*make_batch(2))
        job.model.ln_final.weight.grad[3] = math.inf
        outcome = update(job, loss)
        assert all(parameter.grad is None for parameter in job.model.parameters())
        outcomes.append((scale.scale.item(), outcome.applied, outcome.nonfinite))
    assert outcomes == [(2.0, False, False), (1.0, False, False), (1.0, False, True)]
    assert all(torch.equal(weight, before[name]) for name, weight in job.weights().items())


def test_the_loss_scale_halves_on_overflow_and_grows_after_good_steps_in_a_row():
    scale, resumed = LossScale(), LossScale()
    good, bad = torch.tensor(False), torch.tensor(True)
    for _ in range(GROWTH_INTERVAL - 1):
        assert not scale.judge(good)
    assert not scale.judge(bad)
    assert scale.state() == LossScaleState(scale=INITIAL_SCALE / 2, good_steps=0)
    for number in range(GROWTH_INTERVAL - 1):
        scale.judge(good)
        if number == 7:
            resumed.restore(scale.state())
        elif number > 7:
            resumed.judge(good)
    for each in (scale, resumed):  # the steps before the overflow do not count
        assert each.state() == LossScaleState(scale=INITIAL_SCALE / 2, good_steps=GROWTH_INTERVAL - 1)
        each.judge(good)
        assert each.state() == LossScaleState(scale=INITIAL_SCALE, good_steps=0)
    halvings = 0
    while not scale.judge(bad):
        halvings += 1
    assert (halvings, scale.state().scale) == (16, 1.0)


@pytest.mark.parametrize("optimizer", [AdamW, torch.optim.AdamW])  # the second obeys no decision
def test_fault_66_bad_steps_and_any_after_too_many_of_them_change_nothing(optimizer):
    """The step after the last one may be launched already when the host learns that the run is over."""
    job = Job(max_skips=1, optimizer=optimizer)
    assert job.step.runs_ahead is False
    outcomes = []
    for value in (1.0, math.nan, 1.0, -math.inf, math.nan, 1.0, 1.0):
        before = [*job.weights().values()], copy.deepcopy(list(job.optimizer.state.values()))
        outcome = update(job, job.step.accumulate(*make_batch(2)) * value)
        outcomes.append((outcome.applied, outcome.nonfinite))
        assert all(parameter.grad is None for parameter in job.model.parameters())
        same = all(map(torch.equal, before[0], job.weights().values()))
        assert same == (not outcome.applied)
        if not outcome.applied:
            for state, expected in zip(job.optimizer.state.values(), before[1], strict=True):
                assert all(torch.equal(state[key], expected[key]) for key in expected)
    good, bad, over = (True, False), (False, True), (False, False)
    assert outcomes == [good, bad, good, bad, bad, over, over]
    assert job.step.skipped.item() == 2


def test_an_outcome_has_the_losses_of_all_ranks_bit_for_bit():
    """Bits travel as integers, of which the largest over the ranks is kept: NaN, infinity and -0.0 come through."""
    values = torch.tensor([math.nan, -0.0, math.inf, -1e-45, 3.7])
    ranks = Ranks(rank=2, world_size=5)
    report = torch.cat((torch.tensor([0, 1, 0, 0]), values.view(torch.int32), values[4:].view(torch.int32)))
    outcome = Outcome(report.to(torch.int32), ranks)
    assert torch.equal(outcome.losses.view(torch.int32), values.view(torch.int32))
    assert outcome.loss.item() == math.inf
    assert outcome.grad_norm.item() == values[4].item()
    assert (outcome.stop, outcome.nonfinite, outcome.save, outcome.applied) == (False, True, False, False)
