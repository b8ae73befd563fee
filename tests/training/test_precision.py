"""bf16 weights and their float32 masters: in one step, in checkpoints, on several ranks; fp8 products."""

from typing import Any

import pytest
import torch
from raising import raises
from run_folders import CONFIG, assert_resumes_exactly, losses, newest, train_here

from lmkit.errors import UsageError
from lmkit.model import fp8
from lmkit.parallel.ranks import Ranks
from lmkit.recipe.load import load_recipe
from lmkit.recipe.tables import ParallelConfig
from lmkit.registry import OPTIMIZERS
from lmkit.training.checkpoint import newest_checkpoint
from lmkit.training.judging import evaluate_run
from lmkit.training.precision import GradientSums
from lmkit.training.resume import restore
from lmkit.training.session import train
from lmkit.training.setup import build_step
from lmkit.training.step import Step
from lmkit.training.weights import model_weights, weights_of

ZERO1 = ParallelConfig(strategy="zero1")


def make_step(seed: int = 0, **options: Any) -> Step:
    torch.manual_seed(seed)
    return build_step(CONFIG, Ranks(), **options)


def masters_of(step: Step) -> dict[torch.Tensor, torch.Tensor]:
    return {p: state["master"] for p, state in step.optimizer.state.items() if "master" in state}


def batch(accumulation: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(64, (2, 8, 8), generator=torch.Generator().manual_seed(1))
    inputs, targets = ids.view(2, accumulation, 8 // accumulation, 8)
    return inputs, targets


def test_matrices_are_held_in_bf16_gains_and_masters_in_float32():
    exact, step = make_step(), make_step(precision="bf16")
    masters = masters_of(step)
    for parameter, before in zip(step.model.parameters(), exact.model.parameters(), strict=True):
        if parameter.dim() >= 2:
            assert parameter.dtype == torch.bfloat16
            assert torch.equal(masters[parameter], before)
            assert torch.equal(parameter, before.bfloat16())
        else:
            assert parameter.dtype == torch.float32
            assert parameter not in masters


@pytest.mark.parametrize("accumulation", [1, 8])
def test_gradients_are_near_those_of_float32(accumulation):
    exact, narrow = make_step(), make_step(precision="bf16")
    for step in (exact, narrow):
        step.accumulate(*batch(accumulation))
    for (name, parameter), other in zip(
        exact.model.named_parameters(), narrow.model.parameters(), strict=True
    ):
        assert other.grad.dtype == other.dtype
        error = (other.grad.float() - parameter.grad).norm() / parameter.grad.norm()
        assert error < 0.03, name  # bf16 has 8 bits: a few roundings of 2^-9 each


def test_gradients_of_micro_batches_add_up_in_float32():
    """1 + 100 x 2^-9 is 1 where bf16 adds."""
    weight = torch.zeros(3, dtype=torch.bfloat16, requires_grad=True)
    unused = torch.zeros(3, dtype=torch.bfloat16, requires_grad=True)
    sums = GradientSums([weight, unused])
    for value in (1.0, *[2.0**-9] * 100):
        weight.grad = torch.full_like(weight, value)
        sums.take()
        assert weight.grad is None
    sums.give()
    assert torch.equal(weight.grad, torch.full_like(weight, 1 + 100 * 2.0**-9))
    assert unused.grad is None


@pytest.mark.parametrize(
    ("precision", "strategy"),
    [("fp32", "none"), *(("bf16", strategy) for strategy in ("none", "zero1", "fsdp"))],
)
def test_a_checkpoint_goes_on_under_every_precision_and_strategy(precision, strategy, tiny):
    """Its float32 weights, or its masters, are the masters of the step that goes on."""
    recipe = tiny(f"train.precision={precision}", f"parallel.strategy={strategy}")
    train_here(recipe, stop_at_step=3)
    exact = make_step(1)
    restore(newest(recipe), exact, "adamw")
    total = sum(abs(w).double().sum().item() for w in exact.model.parameters() if w.dim() > 1)
    for options in (
        {"precision": "bf16"},
        {"precision": "bf16", "parallel": ZERO1},
        {"precision": "bf16", "parallel": ParallelConfig(strategy="fsdp")},
        {"precision": "bf16-autocast"},
        {"precision": "bf16", "optimizer": "muon"},  # takes the masters alone
    ):
        optimizer = options.pop("optimizer", "adamw")
        step = make_step(2, **options)
        assert restore(newest(recipe), step, optimizer).step == 3
        for name, tensor in model_weights(step.model).items():
            assert torch.equal(tensor, model_weights(exact.model)[name].to(tensor.dtype)), (options, name)
        exact_of = dict(zip(step.model.parameters(), exact.model.parameters(), strict=True))
        for parameter, master in masters_of(step).items():
            assert torch.equal(parameter, master.bfloat16())
            assert torch.equal(master, exact_of[parameter])
        if options.get("parallel") is ZERO1:
            states = step.optimizer.state_dict()["state"].values()
            held = [abs(state["master"]).double().sum().item() for state in states if "master" in state]
            assert sum(held) == pytest.approx(total, rel=1e-12)
    assert any(torch.any(w != w.bfloat16()) for w in exact.model.parameters())


def test_evaluation_and_generation_compute_in_bf16(tiny):
    recipe = tiny("train.precision=bf16")
    result = train_here(recipe)
    checkpoint = newest(recipe)
    model = weights_of(checkpoint).model("cpu")
    assert {p.dtype for p in model.parameters() if p.dim() >= 2} == {torch.bfloat16}
    assert model(torch.zeros(1, 4, dtype=torch.int64)).dtype == torch.bfloat16
    loss = evaluate_run(recipe.run.path, device="cpu").loss
    assert loss == result.evaluation.loss == losses(recipe, "final")[0][1]
    names = {name.rpartition(".")[2] for name in checkpoint.all_optimizer_shards()[0]}
    assert names == {"step", "exp_avg", "exp_avg_sq", "master"}


def test_an_optimizer_that_keeps_no_masters_is_refused(tiny):
    name = "without_masters"
    OPTIMIZERS.register(name)(lambda groups, options: torch.optim.SGD(groups, lr=options.lr))
    with raises(UsageError, "recipe.conflict", "train.precision", "bf16-autocast"):
        tiny("train.precision=bf16", f"optimizer.name={name}")
    tiny("train.precision=bf16-autocast", f"optimizer.name={name}")


FP8 = ("run.device=auto", "train.precision=fp8")


def test_fp8_resumes_bit_for_bit_and_evaluates_in_bf16(tiny, monkeypatch):
    monkeypatch.setattr(fp8, "check_fp8", lambda device: None)
    monkeypatch.setattr(fp8, "FP8_LEAST_WIDTH", 16)
    whole = tiny(*FP8)
    result, _ = assert_resumes_exactly(whole)
    assert evaluate_run(whole.run.path, device="cpu").loss == result.evaluation.loss
    narrow = tiny("train.precision=bf16", "run.name=narrow")
    train_here(narrow)
    pairs = list(zip(losses(whole), losses(narrow), strict=True))
    assert all(mine != theirs for mine, theirs in pairs)
    assert all(mine[1] == pytest.approx(theirs[1], rel=5e-3) for mine, theirs in pairs)
    names = {name.rpartition(".")[2] for name in newest(whole).all_optimizer_shards()[0]}
    assert names == {"step", "exp_avg", "exp_avg_sq", "master"}


@pytest.mark.parametrize("has_bf16", [False, True])
def test_auto_is_bf16_where_the_device_has_it_and_stays_what_it_was(tiny, monkeypatch, has_bf16):
    monkeypatch.setattr("lmkit.training.session.has_bf16", lambda device: has_bf16)
    recipe = tiny("train.precision=auto", "train.steps=4", "checkpoint.interval=2")
    train(recipe, stop_at_step=2)
    wanted = "bf16" if has_bf16 else "fp32"
    assert newest_checkpoint(recipe.run.path).state.recipe["train"]["precision"] == wanted
    monkeypatch.setattr("lmkit.training.session.has_bf16", lambda device: not has_bf16)
    resumed = train(recipe)
    assert (resumed.resumed_from, resumed.step) == (2, 4)
    assert newest_checkpoint(recipe.run.path).state.recipe["train"]["precision"] == wanted
    assert load_recipe(recipe.run.path / "recipe.toml").train.precision == "auto"  # type: ignore[union-attr]
