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
def test_what_is_shown_is_the_recipe(name, tmp_path):
    text = annotated_toml(load_recipe(name))
    shown = tmp_path / "shown.toml"
    shown.write_text(text)
    assert load_recipe(shown, benches=True) == load_recipe(name, benches=True)
    assert max(map(len, text.splitlines())) <= 100


def test_a_key_is_shown_with_value_choices_and_meaning():
    changes = ['generate.prompts=["a\\nb", "# c"]', "train.precision=fp32"]
    lines = annotated_toml(load_recipe("quickstart", changes)).splitlines()
    (precision,) = (line for line in lines if line.startswith('precision = "fp32"'))  # of [train]
    assert precision.startswith('precision = "fp32"  ')
    assert "# fp32, bf16, fp8, bf16-autocast, fp16 or auto. " in precision
    (unset,) = (line for line in lines if "max_minutes" in line)
    assert unset.startswith("# max_minutes =  ")
    assert "# not set. " in unset
    assert any(line.startswith('prompts = ["a\\nb", "# c"]') for line in lines)
    assert any(line.startswith("# Tables that this recipe does not have: [bench.") for line in lines[-3:])
