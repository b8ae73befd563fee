"""The gate of trainings: what it refuses on one process, and what it must let pass. Strategies: test_ddp.py."""

import math
from dataclasses import replace

import pytest
import torch
from raising import raises

from lmkit.bench import training_gate as gate
from lmkit.bench.step import FewBatches
from lmkit.core.batches import RandomTokens
from lmkit.errors import UsageError
from lmkit.parallel.ranks import Ranks
from lmkit.recipe.recipe import Recipe
from lmkit.recipe.tables import ModelConfig, OptimizerConfig, TrainConfig
from lmkit.registry import OPTIMIZERS
from lmkit.training.setup import TrainingStep

SHAPE = {"vocab_size": 64, "context_length": 12, "d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2}


def recipe_of(*, precision="fp32", optimizer="adamw", **model) -> Recipe:
    train = TrainConfig(batch_size=4, precision=precision)
    return Recipe(model=ModelConfig(**SHAPE, **model), train=train, optimizer=OptimizerConfig(name=optimizer))


def fault_of(recipe: Recipe) -> str:
    found = gate.follow(TrainingStep(recipe, Ranks()))
    theirs = gate.reference(gate.of_pytorch(recipe), Ranks())
    assert isinstance(theirs, list)
    assert recipe.train is not None
    return gate.fault(found, theirs, gate.budget_of(recipe.train.precision))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-autocast"])
@pytest.mark.parametrize(
    "model",
    [
        {"attention": "flash_torch"},
        {"qkv_bias": True},  # the gradient of a key's bias is nothing but rounding errors
        {"tie_embeddings": True, "qk_norm": True},
        {"compile": "none", "activation_checkpointing": "block", "attention": "vectorized"},
    ],
    ids=lambda model: next(iter(model)),
)
def test_right_trainings_pass(precision, model):
    assert fault_of(recipe_of(precision=precision, **model)) == ""


@pytest.mark.parametrize("optimizer", ["sgd", "muon"])
def test_other_optimizers_pass(optimizer):
    assert fault_of(recipe_of(optimizer=optimizer)) == ""


@pytest.mark.usefixtures("_planted_kernels")
@pytest.mark.parametrize(
    "kernel", ["zeros", "scaled", "mask_too_wide", "mask_too_narrow", "gradient_dropped"]
)
def test_wrong_kernels_are_found(kernel):
    assert fault_of(recipe_of(attention=kernel)).startswith("step 1: ")


def test_the_first_fault_is_named_with_its_budget():
    theirs = gate.reference(recipe_of(), Ranks())
    assert isinstance(theirs, list)
    assert gate.fault(theirs, theirs, gate.EXACT) == ""
    name = "layers.1.ln2.weight"
    gradients = theirs[1].gradients
    broken = replace(theirs[1], gradients=gradients | {name: gradients[name] * 1.01})
    found = gate.fault([theirs[0], broken, theirs[2]], theirs, gate.EXACT)
    assert found.startswith(f"step 2: the gradient of {name}: ")
    assert "0.01," in found
    assert gate.fault([theirs[0], broken, theirs[2]], theirs, gate.ROUNDED) == ""
    for other in (replace(theirs[0], norm=math.nan), replace(theirs[0], loss=math.inf)):
        assert gate.fault([other, *theirs[1:]], theirs, gate.ROUNDED).startswith("step 1: the ")


def test_weights_that_do_not_move_are_found_without_gradients():
    """Where ranks share gradients out, what the optimizer made of them is all there is to see."""
    theirs = gate.reference(recipe_of(), Ranks())
    assert isinstance(theirs, list)
    name = "layers.0.ffn.w2.weight"
    stuck = [replace(seen, gradients={}, weights=seen.weights | {name: seen.start[name]}) for seen in theirs]
    assert f"the change of {name}: " in gate.fault(stuck, theirs, gate.ROUNDED)
    assert gate.fault([replace(seen, gradients={}) for seen in theirs], theirs, gate.EXACT) == ""


def test_what_is_judged_has_made_its_first_steps():
    training = TrainingStep(recipe_of(), Ranks())
    row, losses = gate.judge(training, gate.reference(recipe_of(), Ranks()), gate.EXACT)
    assert row == {"status": "ok"}
    assert len(losses) == gate.STEPS == training._done
    unchecked, _ = gate.judge(training, "no room", gate.EXACT)
    assert unchecked == {"status": "ok", "unchecked": "no room"}


@pytest.mark.parametrize(
    ("precision", "optimizer"),
    [("fp32", "adamw"), ("bf16", "adamw"), ("fp32", "muon"), ("bf16-autocast", "sgd")],
)
def test_a_training_is_right_after_timing_and_its_weights_have_not_moved(precision, optimizer):
    recipe = recipe_of(precision=precision, optimizer=optimizer, attention="flash_torch")
    training = TrainingStep(recipe, Ranks())
    for _ in range(20):
        training.run()
    before = {name: weight.clone() for name, weight in training.model.state_dict().items()}
    assert gate.after_timing(training, gate.budget_of(precision), forward=True) == {}
    for name, weight in training.model.state_dict().items():
        assert torch.equal(weight, before[name]), name
    training.step.skipped += 1  # a step of the past whose loss was not finite
    assert gate.after_timing(training, gate.budget_of(precision))["status"] == "wrong result"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_training_that_knows_its_batches_by_heart_is_right_after_timing(precision):
    """Their gradients are near zero, and rounding is a large share of them: other tokens are used."""
    batches = FewBatches((RandomTokens(64, batch_size=4, context_length=12, seed=0).batch(0),))
    recipe = recipe_of(precision=precision, attention="flash_torch").changed(optimizer={"lr": 1e-2})
    training = TrainingStep(recipe, Ranks(), batches)
    losses = [training.run().item() for _ in range(200)]
    assert losses[-1] < 0.1  # some tokens of the batch have two successors
    assert gate.after_timing(training, gate.budget_of(precision), forward=True) == {}


def test_a_kernel_that_refuses_the_device_is_refused_and_not_wrong():
    with raises(UsageError, "attention.unsupported", "flash_triton"):
        fault_of(recipe_of(attention="flash_triton"))


@pytest.mark.parametrize(("elements", "is_wrong"), [(8, False), (4096, True)])
def test_one_flipped_sign_of_a_few_elements_is_rounding(elements, is_wrong):
    """AdamW's first change of a weight is its learning rate, with the sign of the gradient."""
    start, right = torch.zeros(elements), torch.ones(elements)
    mine = right.clone()
    mine[: 1 if elements == 8 else elements // 4] = -1  # relative errors 0.707 and 1

    def seen(weights):
        return gate.Seen(
            loss=1.0, norm=1.0, gradients={"w": right}, start={"w": start}, weights={"w": weights}
        )

    assert bool(gate.fault([seen(mine)], [seen(right)], gate.ROUNDED)) == is_wrong


@pytest.mark.usefixtures("_planted_kernels")
def test_what_the_reference_shares_with_a_training_is_said_to_be_unchecked():
    @OPTIMIZERS.register("from_outside")
    def make(groups, options):
        return torch.optim.SGD(groups, lr=0.1)

    recipe = recipe_of(optimizer="from_outside", attention="window")
    theirs = gate.reference(gate.of_pytorch(recipe), Ranks())
    row, _ = gate.judge(TrainingStep(recipe, Ranks()), theirs, gate.EXACT)
    assert row["status"] == "ok"
    assert "window" in row["unchecked"]
    assert "optimizer updates of from_outside" in row["unchecked"]
