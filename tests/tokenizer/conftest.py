"""What the tokenizer is compared with: the textbook trainer, and small tokenizers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import regex

from lmkit.tokenizer import Tokenizer, train_tokenizer
from lmkit.tokenizer.pattern import PATTERN

Merges = list[tuple[bytes, bytes]]


def textbook_merges(text: str, num_merges: int, special_tokens: tuple[str, ...] = ()) -> Merges:
    """The specification of training: count every pair anew, merge the best one everywhere, repeat."""
    longest_first = sorted(special_tokens, key=len, reverse=True)
    parts = regex.split("|".join(map(regex.escape, longest_first)), text) if special_tokens else [text]
    counts = Counter(word for part in parts for word in regex.findall(PATTERN, part))
    words = {word: [bytes([byte]) for byte in word.encode()] for word in counts}
    merges: Merges = []
    while len(merges) < num_merges:
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for word, tokens in words.items():
            for pair in pairwise(tokens):
                pairs[pair] += counts[word]
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        for tokens in words.values():
            i = 0
            while i < len(tokens) - 1:
                if (tokens[i], tokens[i + 1]) == best:
                    tokens[i : i + 2] = [best[0] + best[1]]
                i += 1
    return merges


def textbook_encode(
    text: str, vocab: dict[int, bytes], merges: Merges, special_tokens: tuple[str, ...]
) -> list[int]:
    """The specification of encoding: in every word apply each merge in turn."""
    ids = {token: token_id for token_id, token in sorted(vocab.items(), reverse=True)}
    longest_first = sorted(special_tokens, key=len, reverse=True)
    parts = (
        regex.split("(" + "|".join(map(regex.escape, longest_first)) + ")", text)
        if special_tokens
        else [text]
    )
    result = []
    for part in parts:
        if part in special_tokens:
            result.append(ids[part.encode()])
            continue
        for word in regex.findall(PATTERN, part):
            tokens = [bytes([byte]) for byte in word.encode()]
            for left, right in merges:
                i = 0
                while i < len(tokens) - 1:
                    if (tokens[i], tokens[i + 1]) == (left, right):
                        tokens[i : i + 2] = [left + right]
                    i += 1
            result += [ids[token] for token in tokens]
    return result


@pytest.fixture(scope="session")
def oracle_merges() -> Callable[..., Merges]:
    return textbook_merges


@pytest.fixture(scope="session")
def oracle_encode() -> Callable[..., list[int]]:
    return textbook_encode


@pytest.fixture(scope="session")
def real_text() -> str:
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
def trained(tmp_path_factory: pytest.TempPathFactory, real_text: str) -> Tokenizer:
    """A tokenizer of 2000 tokens with special tokens that overlap and hold a space."""
    corpus = tmp_path_factory.mktemp("corpus") / "text.txt"
    corpus.write_text(real_text, "utf-8")
    special_tokens = ("<|endoftext|>", "<|endoftext|><|pad|>", "<|pad|>", "<|two words|>")
    return train_tokenizer([corpus], vocab_size=2000, special_tokens=special_tokens)
