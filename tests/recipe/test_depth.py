"""`model.depth`: what follows from it, and what the recipe gives instead."""

from typing import Any

import pytest
from raising import raises

from lmkit.errors import UsageError
from lmkit.model.accounting import count_parameters
from lmkit.recipe.load import load_recipe, validate


def recipe_of(**tables: Any) -> Any:
    model = {"depth": 12, "vocab_size": 32768, "context_length": 1024}
    return validate({"model": model} | tables, origin="test")


@pytest.mark.parametrize("depth", [1, 4, 12, 26])
def test_what_follows_fits_together(depth):
    model = {"depth": depth, "vocab_size": 32768, "context_length": 1024}
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


FILE = """
model = {d_model = 64, d_ff = 64, num_layers = 1, num_heads = 2}
train = {steps = 7, batch_size = 16}
optimizer.lr = 0.5
"""


def test_on_the_command_line_it_decides_the_sizes_and_nothing_else_that_the_file_gives(write):
    recipe = load_recipe(write(FILE), ["model.depth=3", "train.batch_size=32"])
    assert (recipe.model.num_layers, recipe.model.d_model) == (3, 192)
    assert (recipe.train.steps, recipe.train.batch_size, recipe.optimizer.lr) == (7, 32, 0.5)


def test_what_the_file_leaves_out_follows_from_the_depth_of_the_command_line(write):
    given = "model.vocab_size = 32768\nmodel.context_length = 1024\ntrain.eval_interval = 5\n"
    recipe = load_recipe(write(given), ["model.depth=12"])
    assert (recipe.train.steps, recipe.optimizer.lr) == (recipe_of().train.steps, recipe_of().optimizer.lr)


def test_tokens_of_the_command_line_decide_the_steps_though_the_file_gives_some(write):
    path = write(FILE)
    few, many = (
        load_recipe(path, ["model.depth=3", f"train.tokens_per_parameter={tokens}"]).train.steps
        for tokens in (10, 20)
    )
    assert many == pytest.approx(2 * few, abs=1)
    assert load_recipe(path, ["train.tokens_per_parameter=10"]).train.steps == 7  # nothing follows from it
    both = ["model.depth=3", "train.tokens_per_parameter=10", "train.steps=9"]
    assert load_recipe(path, both).train.steps == 9


def test_preset_and_depth_are_refused_together():
    with raises(UsageError, "recipe.wrong_value", "depth"):
        recipe_of(model={"preset": "tiny", "depth": 3})
