"""The optimizer `sgd` of recipes: PyTorch's steps, its options, the precision it trains in, what it refuses."""

import pytest
import torch
from raising import raises

from lmkit.errors import UsageError
from lmkit.optim.sgd import make_sgd
from lmkit.recipe.recipe import Recipe
from lmkit.recipe.tables import ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig
from lmkit.training.plan import held_by
from lmkit.training.precision import with_precision


def test_steps_are_those_of_the_formula():
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    options = OptimizerConfig(name="sgd", lr=0.5, options={"momentum": 0.8})
    optimizer = make_sgd([{"params": [weight], "weight_decay": 0.1}], options)
    value, momentum = weight.detach().clone(), torch.zeros(2, dtype=torch.float64)
    for step in range(3):
        gradient = torch.tensor([0.25, -1.0], dtype=torch.float64) * (step + 1)
        weight.grad = gradient.clone()
        optimizer.step()
        momentum = 0.8 * momentum + gradient + 0.1 * value
        value = value - 0.5 * momentum
    torch.testing.assert_close(weight.detach(), value, rtol=1e-14, atol=0)  # a few roundings of float64


@pytest.mark.parametrize(
    "options", [{"momentum": 1.0}, {"momentum": 0.0, "nesterov": True}], ids=("one", "nesterov without")
)
def test_momentum_out_of_range_is_refused(options):
    with raises(UsageError, "optimizer.momentum", "optimizer.options.momentum"):
        make_sgd([], OptimizerConfig(name="sgd", options=options))


def test_auto_casts_weights_where_no_masters_are_kept():
    def precision(name: str, has_bf16: bool) -> str:
        recipe = Recipe(optimizer=OptimizerConfig(name=name), train=TrainConfig(precision="auto"))
        return with_precision(recipe, has_bf16=has_bf16).train.precision

    found = {name: precision(name, True) for name in ("adamw", "muon", "sgd")}
    assert found == {"adamw": "bf16", "muon": "bf16", "sgd": "bf16-autocast"}
    assert precision("sgd", False) == "fp32"


def test_a_plan_counts_one_moment_for_every_weight():
    moments = {}
    for name in ("adamw", "muon", "sgd"):
        tables = (TrainConfig(precision="fp32"), ParallelConfig(), OptimizerConfig(name=name))
        held = held_by(ModelConfig(vocab_size=300), *tables, 1)
        moments[name] = (held.moments, held.other_moments)
    assert moments == {"adamw": (2, 2), "muon": (1, 2), "sgd": (1, 1)}
