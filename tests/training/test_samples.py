"""Texts written while training: the right ones, and the training does not notice."""

import json
from pathlib import Path

import pytest
from run_folders import Tiny, assert_same_state, losses, newest, records, train_here

from lmkit.errors import LmkitError
from lmkit.generation import generate, write_samples
from lmkit.recipe.recipe import Recipe
from lmkit.tokenizer import Tokenizer
from lmkit.training.checkpoint import open_checkpoint
from lmkit.training.session import train
from lmkit.training.weights import weights_of

PROMPTS = 'generate.prompts=["a", "bc"]'


@pytest.fixture
def writing(tiny: Tiny, tmp_path: Path, token_files: tuple[Path, Path]) -> Tiny:
    """Recipes that write two texts every two steps, with a tokenizer of the bytes; the model knows 300 ids."""
    path = tmp_path / "tokenizer.json"
    Tokenizer.from_merges([], ["<|endoftext|>"]).save(path)
    options = (
        *("optimizer.lr=0.3", "model.vocab_size=257", "data.source=random", f'tokenizer.path="{path}"'),
        "generate.max_new_tokens=12",
    )
    return lambda *more: tiny(*options, PROMPTS, "train.sample_interval=2", "train.steps=6", *more)


def test_texts_are_those_of_the_model_at_that_step(writing):
    recipe = writing("checkpoint.interval=2", "checkpoint.keep_last=9")
    train(recipe, write_samples=write_samples)
    found = records(recipe, "sample")
    assert [(record["step"], record["number"]) for record in found] == [
        (s, n) for s in (2, 4, 6) for n in (0, 1)
    ]
    tokenizer = Tokenizer.load(recipe.tokenizer.path)  # type: ignore[arg-type]
    for step in (2, 4, 6):
        checkpoint = open_checkpoint(recipe.run.path / f"checkpoints/step-{step:08d}")
        made = generate(weights_of(checkpoint).model("cpu"), tokenizer, ["a", "bc"], recipe.generate)
        assert [record["text"] for record in found if record["step"] == step] == [
            text.prompt + text.text for text in made
        ]
    assert len({record["text"] for record in found}) > 2  # the model changes


def test_training_does_not_notice(writing):
    """Weights, optimizer, random generators and losses: without texts, with texts, and resumed with texts."""
    plain = writing("train.sample_interval=0", "run.name=plain")
    train_here(plain)
    for name, stops in {"whole": (None,), "resumed": (3, None)}.items():
        recipe = writing(f"run.name={name}")
        for stop in stops:
            train(recipe, stop_at_step=stop, write_samples=write_samples)
        assert_same_state(newest(plain), newest(recipe))
        assert losses(plain) == losses(recipe)
        assert [record["step"] for record in records(recipe, "sample")] == [2, 2, 4, 4, 6, 6]


def test_training_goes_on_without_texts(writing, monkeypatch, capsys):
    def fail(model: object, recipe: Recipe) -> list[str]:
        raise LmkitError("generate.not_finite", "predictions are not finite", hint="hint")

    result = train(writing(), write_samples=fail)
    assert result.status == "finished"
    assert "step 2: no texts: " in capsys.readouterr().err
    with pytest.raises(ValueError, match="write_samples"):
        train(writing())


@pytest.mark.full
def test_ranks_with_shards_write_what_one_rank_writes(writing):
    """Greedily: the ranks' weights differ by roundings."""
    texts = []
    for nproc in (1, 2):
        recipe = writing(f"run.name=of{nproc}", "parallel.strategy=fsdp", "generate.temperature=0")
        train(recipe, nproc=nproc, write_samples=write_samples)
        texts.append([json.dumps(record) for record in records(recipe, "sample")])
    assert len(texts[0]) == 6
    assert texts[0] == texts[1]
