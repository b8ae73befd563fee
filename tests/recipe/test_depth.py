"""`model.depth`: what follows from it, and what the recipe gives instead."""

from typing import Any

import pytest
from raising import raises

from lmkit.errors import UsageError
from lmkit.model.accounting import count_parameters
from lmkit.recipe.load import load_recipe, validate


def recipe_of(**tables: Any) -> Any:
    return validate(
        {"model": {"depth": 12, "vocab_size": 32768, "context_length": 1024}} | tables, origin="test"
    )


@pytest.mark.parametrize("mlp", ["swiglu", "relu2"])
@pytest.mark.parametrize("depth", [1, 4, 12, 26])
def test_what_follows_fits_together(depth, mlp):
    model = {"depth": depth, "vocab_size": 32768, "context_length": 1024, "mlp": mlp}
    recipe = recipe_of(model=model, train={"tokens_per_parameter": 10.0})
    assert recipe.model.num_layers == depth
    assert recipe.model.d_model == max(64 * depth, 64)
    parameters = count_parameters(recipe.model).multiplying
    seen = recipe.train.steps * recipe.train.batch_size * 1024
    assert seen == pytest.approx(10 * parameters, rel=0.01)  # norms, and the last part of a step
    assert recipe.train.batch_size.bit_count() == 1


def test_it_is_what_public_logs_have():
    small, large = recipe_of(), recipe_of(model={"depth": 26, "vocab_size": 32768, "context_length": 2048})
    assert (small.model.d_model, small.model.num_heads, small.model.d_ff) == (768, 6, 2048)
    assert small.train.batch_size * 1024 == 1 << 19
    assert large.train.batch_size * 2048 == 1 << 20
    assert small.optimizer.lr == pytest.approx(1e-3)


def test_what_the_recipe_gives_counts_and_decides_the_rest():
    recipe = recipe_of(train={"batch_size": 64}, optimizer={"lr": 0.5})
    assert (recipe.train.batch_size, recipe.optimizer.lr) == (64, 0.5)
    assert recipe.train.steps == pytest.approx(8 * recipe_of().train.steps, rel=0.01)


def test_on_the_command_line_it_replaces_what_the_file_gives():
    recipe = load_recipe("quickstart", ["model.depth=3", "train.steps=7"])
    assert (recipe.model.num_layers, recipe.model.d_model, recipe.train.steps) == (3, 192, 7)
    assert load_recipe("quickstart").optimizer.lr != recipe.optimizer.lr


def test_preset_and_depth_are_refused_together():
    with raises(UsageError, "recipe.wrong_value") as caught:
        recipe_of(model={"preset": "tiny", "depth": 3})
    assert "depth" in str(caught.value)
