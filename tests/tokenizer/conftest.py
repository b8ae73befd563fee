"""Texts for the tokenizer, and a small trained tokenizer."""

import json
from pathlib import Path

import pytest

from lmkit.tokenizer import Tokenizer, engine, train_tokenizer

# Everything that the branches of the pattern depend on: spaces of one to three bytes, all parts of contractions,
# classes in characters of one to four bytes, combining marks, words around the sizes at which the C code changes its
# method (8, 16 and 64 bytes), and parts of special tokens.
PIECES = [
    *" \n\t\r\x0b\x0c\x1c\x85\u00a0\u2003\u3000\u200b\u200d",
    *"'sdmtlvre’",
    *"aA[`{@ZzZé日𝒜߀٣½Ⅷ𝟘9",
    *".,!-_\u0301\u0000\ufeff\U0001f469",
    "'s", "'ll", "'ve", "'re", "'t", " '", "  ", "    ", "\r\n", "👩‍👩‍👧‍👦", " the", " return", "self.",
    "abcdefg", "abcdefgh", " abcdefghi", "a" * 14, "b" * 15, "c" * 16, "d" * 17, "=" * 40, "a" * 70, " b" * 20,
    "<|endoftext|>", "<|pad|>", "<|two words|>", "<|", "|>", "endoftext|>",
]  # fmt: skip


@pytest.fixture(scope="session")
def pieces():
    return PIECES


@pytest.fixture(scope="session")
def real_text():
    """A few hundred kilobytes of the standard library: code, docstrings, tables, and some text that is not ASCII."""
    import argparse
    import collections
    import json
    import statistics
    import typing

    modules = (argparse, collections, json, statistics, typing)
    texts = [Path(module.__file__).read_text("utf-8") for module in modules]
    texts.append(
        "naïve café, Ελληνικά, 日本語のテキスト。 👩‍👩‍👧‍👦 e\u0301\u0323 ½ ٣٤٥\u00a0x\u2003y\r\nz\t\t q"
    )
    return "<|endoftext|>\n".join(texts)


@pytest.fixture(scope="session")
def trained(tmp_path_factory, real_text):
    """A tokenizer of 2000 tokens with special tokens that overlap and hold a space."""
    corpus = tmp_path_factory.mktemp("corpus") / "text.txt"
    corpus.write_text(real_text, "utf-8")
    special_tokens = ("<|endoftext|>", "<|endoftext|><|pad|>", "<|pad|>", "<|two words|>")
    return train_tokenizer([corpus], vocab_size=2000, special_tokens=special_tokens)


@pytest.fixture(params=["python", "native"])
def code(request, monkeypatch):
    """Run a test with the engine in Python and with the engine in C."""
    if request.param == "python":
        monkeypatch.setattr(engine, "library", lambda: None)
    elif engine.library() is None:
        pytest.skip("no C compiler on this machine")
    return request.param


@pytest.fixture
def folder(tmp_path):
    """Writes a tokenizer of bytes and special tokens (from 256 on), and files beside it, `{name without ending:
    content}`; returns its path."""

    def write(name="tokenizer.json", special=("<s>", "<|im_end|>", "<end>"), **beside):
        Tokenizer.from_merges([], special).save(tmp_path / name)
        for stem, content in beside.items():
            (tmp_path / f"{stem}.json").write_text(json.dumps(content))
        return tmp_path / name

    return write
