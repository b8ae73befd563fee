"""Training, evaluation and verification on token files in several shards."""

from pathlib import Path

import numpy as np
import pytest
from byte_tokenizers import of_bytes
from raising import raises
from run_folders import assert_same_state, losses, newest, records, train_here

from lmkit.data.encoding import encode_corpus
from lmkit.data.shards import open_tokens
from lmkit.data.token_files import TokenFileWriter
from lmkit.errors import LmkitError, UsageError
from lmkit.recipe.load import load_recipe
from lmkit.training.judging import evaluate_documents, evaluate_run
from lmkit.training.session import plan
from lmkit.training.verify import verify_path, verify_resume

END = "<|endoftext|>"


@pytest.fixture
def shards(token_files, tmp_path) -> Path:
    """The folder of the training and the held-out file, cut into two shards each."""
    for path in token_files:
        file = open_tokens(path)
        border = len(file.tokens) // 3
        for number, part in enumerate((slice(0, border), slice(border, None))):
            ids, starts = file.tokens[part], file.documents.astype(int)
            inside = starts[(starts >= part.start) & (starts < part.start + len(ids))] - part.start
            name = tmp_path / f"{path.stem}_{number}.npy"
            with TokenFileWriter(name, vocab_size=64, tokenizer_sha256="a" * 64) as writer:
                writer.append(np.asarray(ids), documents=inside)
                writer.finish(num_bytes=3 * len(ids), source_sha256=f"{number}" * 64)
    return tmp_path


@pytest.fixture
def on_shards(tiny, shards):
    named = (
        f'data.train="{shards}/train_*.npy"',
        f'data.valid=["{shards}/valid_0.npy", "{shards}/valid_1.npy"]',
    )
    return lambda *more: tiny("run.name=shards", *named, *more)


@pytest.mark.parametrize("sampling", ["windows", "packed"])
def test_a_run_on_shards_is_the_run_on_one_file(sampling, tiny, on_shards, shards):
    whole, parts = tiny(f"data.sampling={sampling}"), on_shards(f"data.sampling={sampling}")
    for recipe in (whole, parts):
        train_here(recipe)
    assert_same_state(newest(whole), newest(parts))
    assert losses(whole, "final") == losses(parts, "final") != []
    assert load_recipe(parts.run.path / "recipe.toml") == parts
    result = evaluate_run(parts.run.path)
    assert result.loss == losses(parts, "final")[0][1]
    assert evaluate_run(parts.run.path, tokens=shards / "valid_?.npy") == result
    assert "valid_0.npy" in result.tokens_file
    assert "valid_1.npy" in result.tokens_file


def test_resuming_needs_the_same_shards_in_the_same_order(on_shards, shards):
    train_here(on_shards(), stop_at_step=1)
    first, second = (f'"{shards}/train_{number}.npy"' for number in (0, 1))
    train_here(on_shards(f"data.train=[{first}, {second}]"), stop_at_step=2)
    for others in (f"[{second}, {first}]", first):
        with raises(UsageError, "resume.other_recipe", "data.train"):
            train_here(on_shards(f"data.train={others}"))


def test_missing_shards_are_refused_by_key_and_name(on_shards, shards):
    for key, code in (("train", "data.no_tokens"), ("valid", "data.no_tokens")):
        for name in (f'"{shards}/none_*.npy"', f'["{shards}/train_1.npy", "{shards}/none_*.npy"]'):
            with raises(UsageError, code, "none_*.npy", f"data.{key}"):
                train_here(on_shards(f"data.{key}={name}"))
    with raises(UsageError, "tokens.twice", "train_0.npy"):
        plan(on_shards(f'data.train=["{shards}/train_*.npy", "{shards}/train_0.npy"]'))


def test_shards_are_verified(on_shards, shards):
    assert verify_resume(on_shards(), steps=2).ok
    result = verify_path(shards / "train_*.npy")
    assert [check.ok for check in result.checks] == [True, True]
    (shards / "train_1.npy").write_bytes((shards / "train_1.npy").read_bytes()[:-2])
    assert [check.ok for check in verify_path(shards / "train_*.npy").checks] == [True, False]


@pytest.fixture
def bins(token_files, tmp_path) -> Path:
    """The folder of the same tokens in `.bin` files; those to train on in two shards."""
    for path in token_files:
        ids = open_tokens(path).tokens
        parts = np.split(ids, [1300]) if path.stem == "train" else [ids]
        for number, part in enumerate(parts):
            header = np.zeros(256, "<i4")
            header[:3] = 20240520, 1, len(part)
            (tmp_path / f"{path.stem}_{number}.bin").write_bytes(header.tobytes() + part.tobytes())
    return tmp_path


def test_bin_files_need_the_vocabulary_and_give_nats(tiny, bins, capsys):
    whole = tiny()
    named = (f'data.train="{bins}/train_*.bin"', f'data.valid="{bins}/valid_0.bin"', "run.name=bins")
    with raises(UsageError, "data.no_vocabulary", "train_0.bin", "model.vocab_size", hint="tokenizer.path"):
        train_here(tiny(*named))
    parts = tiny(*named, "model.vocab_size=64")
    train_here(whole)
    capsys.readouterr()
    train_here(parts, stop_at_step=5)
    assert capsys.readouterr().err.count("nats only") == 1
    train_here(parts)
    assert_same_state(newest(whole), newest(parts))
    final, expected = (records(recipe, "final")[0] for recipe in (parts, whole))
    assert (final["loss"], final["bits_per_byte"]) == (expected["loss"], None)
    result = evaluate_run(whole.run.path, tokens=bins / "valid_*.bin")
    assert (result.loss, result.bits_per_byte) == (expected["loss"], None)
    with raises(LmkitError, "tokens.damaged", "train_0.bin", "but the vocabulary has 63"):
        train_here(tiny(*named, "model.vocab_size=63", "run.name=other"))
    with raises(UsageError, "resume.other_recipe", "data.train"):
        train_here(tiny(*named, "model.vocab_size=64", f'data.train="{bins}/train_1.bin"'))


def test_bits_per_byte_of_bin_files_need_their_tokenizer(tiny, tmp_path):
    tokenizer = of_bytes(END, merges=[(b"f", b"i"), (b"s", b"h")])
    tokenizer.save(tmp_path / "tokenizer.json")
    texts = ["one fish two fish", "red blüe fish"] * 50
    (tmp_path / "text.txt").write_text(END.join(texts), "utf-8")
    encode_corpus(tmp_path / "text.txt", tmp_path / "text", tokenizer, format="bin", shard_tokens=500)
    named = [f'data.{part}="{tmp_path}/text_*.bin"' for part in ("train", "valid")]
    for sampling in ("documents", "packed"):
        more = (
            f"run.name={sampling}",
            f"data.sampling={sampling}",
            f'tokenizer.path="{tmp_path}/tokenizer.json"',
        )
        recipe = tiny(*named, *more)
        train_here(recipe)
        final = records(recipe, "final")[0]
        tokens = len(open_tokens(tmp_path / "text_*.bin").tokens)
        assert final["bytes_per_token"] == sum(len(text.encode()) for text in texts) / tokens
        assert final["bits_per_byte"] == pytest.approx(final["loss"] / np.log(2) / final["bytes_per_token"])
        assert evaluate_run(recipe.run.path).bits_per_byte == final["bits_per_byte"]
        documents = evaluate_documents(recipe.run.path).documents
        assert [score.bytes for score in documents] == [len(text.encode()) for text in texts]
        assert newest(recipe).state.model.vocab_size == tokenizer.vocab_size
    unnamed = recipe.changed(tokenizer=None, model={"vocab_size": 300})  # the folder's may be of another text
    with raises(
        UsageError, "data.other_tokenizer", "text_000000.bin", "tokenizer.json", hint="tokenizer.path"
    ):
        train_here(unnamed)
