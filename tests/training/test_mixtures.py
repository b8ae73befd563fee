"""Training on a mixture of token files."""

import numpy as np
import pytest
from raising import raises
from run_folders import assert_resumes_exactly, assert_same_state, losses, newest, train_here

from lmkit.data.shards import open_tokens
from lmkit.data.token_files import TokenFileWriter
from lmkit.errors import UsageError
from lmkit.recipe.load import load_recipe
from lmkit.recipe.tables import SourceConfig
from lmkit.training.run_data import open_data
from lmkit.training.verify import verify_resume


@pytest.fixture
def parts(token_files, tmp_path):
    """The training file cut into three, each a token file."""
    file = open_tokens(token_files[0])
    paths = []
    for number, ids in enumerate(np.split(file.tokens, [1000, 1500])):
        paths.append(tmp_path / f"part_{number}.npy")
        with TokenFileWriter(paths[-1], vocab_size=64, tokenizer_sha256="a" * 64) as writer:
            writer.append(ids, documents=range(0, len(ids), 40))
            writer.finish(num_bytes=3 * len(ids), source_sha256=f"{number}" * 64)
    return paths


@pytest.fixture
def mixture(tiny, parts):
    """A run on two sources, or on those given: (files, weight)."""

    def make(*more, sources=None, name="mixture"):
        sources = sources or [(parts[0], 3.0), ((parts[1], parts[2]), 1.0)]
        tables = [SourceConfig(train=files, weight=weight) for files, weight in sources]
        tables[0] = tables[0].changed(name="web")
        return tiny(f"run.name={name}", *more).changed(data={"train": None, "sources": tuple(tables)})

    return make


@pytest.mark.parametrize("sampling", ["windows", "shuffled", "documents", "packed"])
def test_resuming_is_exact(sampling, mixture):
    _, second = assert_resumes_exactly(mixture(f"data.sampling={sampling}", name=sampling))
    assert load_recipe(second.run.path / "recipe.toml") == second


def test_accumulation_gives_the_same_rows(mixture):
    one, two = mixture("train.accumulation=1"), mixture("train.accumulation=4", name="four")
    for recipe in (one, two):
        train_here(recipe)
    for (_, mine), (_, yours) in zip(losses(one), losses(two), strict=True):
        assert mine == pytest.approx(yours, rel=1e-5)  # float32 sums in another order


@pytest.mark.parametrize("change", ["weights", "order", "file"])
def test_another_mixture_is_refused_when_resuming(change, mixture, parts):
    train_here(mixture(), stop_at_step=1)
    first, second = parts[0], (parts[1], parts[2])
    others = {
        "weights": ([(first, 3.0), (second, 2.0)], "weights: (3.0, 1.0) -> (3.0, 2.0)"),
        "order": ([(second, 3.0), (first, 1.0)], "source_sha256"),
        "file": ([(first, 3.0), (parts[1], 1.0)], "source_sha256"),
    }
    sources, says = others[change]
    with raises(UsageError, "resume.other_recipe", "data.sources", says):
        train_here(mixture(sources=sources))
    assert train_here(mixture(), stop_at_step=2).step == 2


def test_epochs_of_each_source_are_said(mixture, capsys):
    train_here(mixture(), stop_at_step=1)
    # 10 steps of 64 tokens: 480 of 1,000 and 160 of 3,000.
    assert "web 0.48 (75.0%)" in capsys.readouterr().err
    train_here(mixture("data.sampling=shuffled", name="b"), stop_at_step=1)
    said = capsys.readouterr().err
    assert "part_2.npy 0.0533 (25.0%)" in said
    assert said.count("epochs in 10 steps") == 1


def test_a_mixture_has_no_epochs(mixture):
    with raises(UsageError, "train.endless_epoch", "train.epochs", hint="train.max_minutes"):
        train_here(mixture("train.epochs=1"))


def test_wrong_mixtures_are_refused_by_key_and_name(mixture, parts, tmp_path):
    for value, key in (
        ('[{train = "a.npy"}]', "data.sources.0.weight"),
        ('[{train = "a.npy", weight = 0}]', "data.sources.0.weight"),
        ("[{train = 3, weight = 1}]", "data.sources.0.train"),
    ):
        with raises(UsageError, "recipe.wrong_value", key):
            load_recipe(None, [f"data.sources={value}"])
    path = tmp_path / "both.toml"
    path.write_text(f'[data]\ntrain = "{parts[0]}"\n[[data.sources]]\ntrain = "{parts[1]}"\nweight = 1\n')
    with raises(UsageError, "recipe.wrong_value", "train and sources"):
        load_recipe(path)
    assert load_recipe(path, ["data.train=x.npy"]).data.sources == ()
    assert load_recipe(path, ['data.sources=[{train = "x.npy", weight = 1}]']).data.train is None
    with raises(UsageError, "data.no_tokens", "none.npy", "data.sources"):
        train_here(mixture(sources=[(tmp_path / "none.npy", 1.0)]))
    with raises(UsageError, "tokens.twice", "part_0.npy"):
        train_here(mixture(sources=[(parts[0], 1.0), (parts[0], 2.0)]))
    with TokenFileWriter(parts[1], vocab_size=64, tokenizer_sha256="b" * 64) as writer:
        writer.append(np.arange(60))
        writer.finish(num_bytes=60, source_sha256="c" * 64)
    with raises(UsageError, "data.other_tokenizer", "part_1.npy", "web"):
        train_here(mixture(sources=[(parts[0], 1.0), (parts[1], 2.0)]))


def test_a_mixture_of_one_source_is_that_source(tiny, mixture, parts):
    alone, one = tiny(f'data.train="{parts[2]}"'), mixture(sources=[(parts[2], 7.0)])
    for recipe in (alone, one):
        train_here(recipe)
    assert_same_state(newest(alone), newest(one))
    assert open_data(one).identity != open_data(alone).identity


def test_resuming_a_mixture_is_verified(mixture):
    assert verify_resume(mixture(), steps=2).ok
