"""Keys that have an effect only with a value of another: `Only` beside their definitions."""

import logging
from pathlib import Path

import pytest

from lmkit.recipe.load import _warn_once, load_recipe, recipe_to_toml, shipped_recipes
from lmkit.recipe.run_folder import save_record


@pytest.fixture
def vain(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """Returns what loading a recipe warns of: key -> the condition under which it has an effect."""
    monkeypatch.setattr(logging.getLogger("lmkit"), "propagate", True)

    def vain(source: Path | str, *overrides: str) -> dict[str, str]:
        _warn_once.cache_clear()
        caplog.clear()
        origin = load_recipe(source, overrides).origin
        lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert all(str(source) in origin and line.startswith(f"{origin}: ") for line in lines)
        texts = [line.removeprefix(f"{origin}: ") for line in lines]
        return {text.split()[0]: text.partition(" only ")[2] for text in texts}

    return vain


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_set_nothing_in_vain(name, vain):
    assert vain(name) == {}


@pytest.mark.parametrize(
    ("key", "off", "on", "condition"),
    [
        ("model.rope_factor=2", "model.rope_scaling='none'", "model.rope_scaling='linear'", "other than"),
        ("optimizer.eps=1e-6", "optimizer.name='sgd'", "optimizer.name='muon'", 'other than "sgd"'),
        ("train.tokens_per_parameter=2", "train.steps=9", "model.depth=3", "with model.depth"),
        ("corpus.folder='big'", "corpus.source='synth'", "corpus.source='tinystories'", '"files" or "chat"'),
        ("tokenizer.workers=2", "tokenizer.path='t.json'", "train.steps=9", "without tokenizer.path"),
    ],
)
def test_a_key_that_is_set_in_vain_is_named_with_its_condition(key, off, on, condition, write, vain):
    rest = "model.vocab_size=300\ntrain.log_interval=5\n"
    name = key.partition("=")[0]
    assert condition in vain(write(f"{rest}{key}\n{off}\n"))[name]
    assert name not in vain(write(f"{rest}{key}\n{on}\n"))
    assert condition in vain(write(f"{rest}{off}\n"), key)[name]


def test_what_the_user_did_not_set_is_not_said_to_be_in_vain(write, tmp_path, vain, monkeypatch):
    path, in_vain = write("generate.top_k=2\n"), {"generate.top_k": "with generate.temperature other than 0"}
    assert vain(path, "generate.temperature=0") == {}  # the command line turns off what the file turns on
    assert vain(path, "generate.temperature=0", "generate.top_k=2") == in_vain
    assert vain(write(recipe_to_toml(load_recipe(None, ["generate.temperature=0"])))) == {}  # all defaults
    assert vain(write("train.epochs=2\n"), "train.steps=7") == {}  # steps take the place of the file's epochs
    assert vain(write("train.epochs=2\ntrain.steps=7\n")) == {"train.steps": "without train.epochs"}
    path = write("generate.top_k=2\ngenerate.temperature=0\n")
    assert vain(path) == in_vain
    monkeypatch.setenv("RANK", "1")  # the first rank has said it
    assert vain(path) == {}
    monkeypatch.delenv("RANK")
    save_record(tmp_path, {})  # the recipe of a run: lmkit wrote it
    assert vain(path) == {}
