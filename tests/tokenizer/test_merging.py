"""Training against its specification, the textbook trainer in conftest.py."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkit.tokenizer.merging import learn_merges
from lmkit.tokenizer.special_tokens import SpecialTokens
from lmkit.tokenizer.word_counter import NumpyCounter, WordCounts


def merges_of(text: str, num_merges: int) -> list[tuple[bytes, bytes]]:
    counter = NumpyCounter(SpecialTokens({}))
    counter.add(text.encode())
    tokens = [bytes([b]) for b in range(256)]
    pairs = []
    for left, right in learn_merges(counter.result(), num_merges):
        pairs.append((tokens[left], tokens[right]))
        tokens.append(tokens[left] + tokens[right])
    return pairs


# Few letters give many ties, overlaps ("aaaa") and merges that meet; words of many letters give long steps.
corpora = st.one_of(
    st.text("ab", min_size=1, max_size=300),
    st.text("ab ", min_size=1, max_size=300),
    st.text("abcde  '\n.1", min_size=1, max_size=300),
    st.text(min_size=1, max_size=100),
    st.lists(st.sampled_from(["low", "lower", "newest", "widest", " new", " aaaa", "aaa"]), min_size=1).map(
        "".join
    ),
)


@settings(max_examples=400, deadline=None)
@given(corpora, st.integers(1, 300))
def test_merges_are_the_textbook_trainers(oracle_merges: Callable, text: str, num_merges: int) -> None:
    assert merges_of(text, num_merges) == oracle_merges(text, num_merges)


def test_many_words_at_once(oracle_merges: Callable) -> None:
    """Random words with skewed counts: steps of many merges, whose counts lie close together."""
    rng = random.Random(1)
    letters = "abcdefghijklmnopqrst"
    words = ["".join(rng.choices(letters, k=rng.randint(1, 8))) for _ in range(400)]
    text = " ".join(rng.choices(words, weights=[1 / (i + 1) for i in range(400)], k=3000))
    assert merges_of(text, 500) == oracle_merges(text, 500)


def test_real_text(oracle_merges: Callable, real_text: str) -> None:
    text = real_text[:60_000]
    assert merges_of(text, 400) == oracle_merges(text, 400)


def test_ties_go_to_the_greatest_bytes() -> None:
    assert merges_of("ab cd", 2)[0] == (b"c", b"d")
    assert merges_of("ab a\u00ff", 2)[0] == (b"\xc3", b"\xbf")


def test_the_example_of_the_paper(oracle_merges: Callable) -> None:
    text = "low low low low low lower lower widest widest widest newest newest newest newest newest newest"
    text = " " + text
    assert merges_of(text, 3)[:2] == [(b"s", b"t"), (b"e", b"st")]
    assert merges_of(text, 12) == oracle_merges(text, 12)


def test_counts_beyond_32_bits() -> None:
    words = WordCounts(
        text=np.frombuffer(b"abcd", np.uint8),
        lengths=np.array([2, 2]),
        counts=np.array([2**33, 2**33 + 1]),
        num_special=0,
    )
    assert learn_merges(words, 2) == [(ord("c"), ord("d")), (ord("a"), ord("b"))]


def test_pairs_that_never_occur_any_more_are_not_merged() -> None:
    assert merges_of("abc", 10) == [(b"b", b"c"), (b"a", b"bc")]


@pytest.mark.parametrize("unit", ["a", "ab", "abcdefgh"])
def test_one_word_of_a_million_letters(unit: str) -> None:
    start = time.process_time()
    assert merges_of(unit * (1_000_000 // len(unit)), 20)
    assert time.process_time() - start < 30  # quadratic would take hours


def test_nothing_to_learn_from() -> None:
    assert merges_of("a", 5) == []
    assert merges_of("abc", 0) == []
