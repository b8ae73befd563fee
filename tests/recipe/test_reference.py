"""A recipe written out for people: every key, explained, and still a recipe."""

import pytest

from lmkit.recipe.keys import of_class
from lmkit.recipe.load import load_recipe, shipped_recipes
from lmkit.recipe.recipe import TABLES, table_type
from lmkit.recipe.reference import annotated_toml
from lmkit.registry import BENCHES


@pytest.mark.parametrize("name", [*TABLES, *(f"bench.{bench}" for bench in BENCHES.names)])
def test_every_key_says_what_it_means(name):
    table = table_type(name)
    assert table is not None
    keys = of_class(table.__module__, table.__name__)
    assert list(keys) == list(table.model_fields)
    assert all(key.text for key in keys.values())


@pytest.mark.parametrize("name", shipped_recipes())
def test_what_is_shown_is_the_recipe(name, write):
    shown = write(annotated_toml(load_recipe(name)))
    assert load_recipe(shown, benches=True) == load_recipe(name, benches=True)
