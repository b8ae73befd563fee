"""GPT-2's files, and the byte alphabet."""

import json

import pytest
from byte_tokenizers import of_bytes
from raising import raises

from lmkit.errors import LmkitError, UsageError
from lmkit.tokenizer import Tokenizer
from lmkit.tokenizer.files import to_characters


def load(folder):
    return Tokenizer.load_gpt2(folder / "vocab.json", folder / "merges.txt")


def test_gpt2_files(trained, tmp_path, real_text):
    trained.save_gpt2(tmp_path)
    loaded = load(tmp_path)
    assert loaded.special_ids == trained.special_ids
    assert loaded.encode(real_text) == trained.encode(real_text)
    assert (tmp_path / "merges.txt").read_text("utf-8").startswith("#version: 0.2\n")


def test_what_gpt2_files_cannot_hold_is_said(tmp_path, caplog):
    of_bytes("<s>", "</s>", prefix=[256], suffix=[257]).save_gpt2(tmp_path)
    (record,) = caplog.records
    assert "<s>" in record.getMessage()
    assert "</s>" in record.getMessage()


def test_gpt2_files_cannot_hold_other_words(tmp_path):
    with raises(UsageError, "tokenizer.unsupported"):
        of_bytes(pattern="llama3").save_gpt2(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kept", [0, 40])
def test_a_cut_list_of_merges_is_damage(trained, tmp_path, kept):
    trained.save_gpt2(tmp_path)
    merges = tmp_path / "merges.txt"
    merges.write_text("\n".join(merges.read_text().splitlines()[: 1 + kept]))
    with raises(LmkitError, "tokenizer.damaged_file", merges):
        load(tmp_path)


def test_gpt2_files_with_their_own_order_of_bytes(tmp_path):
    """GPT-2 numbers the visible bytes first, and its end-of-text token is in the vocabulary."""
    visible = sorted(range(256), key=lambda byte: (ord(to_characters(bytes([byte]))), byte))
    vocab = {to_characters(bytes([byte])): i for i, byte in enumerate(visible)}
    vocab |= {"Ġt": 256, "he": 257, "Ġthe": 258, "<|endoftext|>": 259}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab), "utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\nĠ t\nh e\nĠt he\n", "utf-8")
    tokenizer = load(tmp_path)
    assert tokenizer.special_ids == {"<|endoftext|>": 259}
    assert tokenizer.encode(" the he!<|endoftext|>") == [258, vocab["Ġ"], 257, vocab["!"], 259]
    assert tokenizer.encode(" the" * 5000) == [258] * 5000


def test_a_merge_that_begins_like_a_comment(tmp_path):
    of_bytes(merges=[(b"#", b"v")]).save_gpt2(tmp_path)
    assert load(tmp_path).merges == [(b"#", b"v")]


def test_gpt2_files_without_all_bytes(tmp_path):
    """A byte that the vocabulary lacks is left out, as in Hugging Face's library."""
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3, "Ġ": 4, "é": 5}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab), "utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n", "utf-8")
    names = (str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    ours, theirs = Tokenizer.load_gpt2(*names), tokenizers.ByteLevelBPETokenizer(*names)
    for text in ("ab", "axb ab", "xyz", "\u9a00é"):  # the first byte of the last is E9
        assert ours.encode(text) == theirs.encode(text).ids
    assert ours.encode("axb<|endoftext|>") == [2, 3]
    ours.save_gpt2(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "vocab.json").read_text("utf-8")) == vocab
