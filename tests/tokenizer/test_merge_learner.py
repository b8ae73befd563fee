"""The fast learner against the readable one."""

import itertools
import random
import sys
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkit.core.bpe import learn_merges
from lmkit.tokenizer.engine import WordCounts
from lmkit.tokenizer.merge_learner import learn_merges_fast
from lmkit.tokenizer.pretokenize import split_words


def same_merges(text, num_merges):
    words = Counter(word.encode() for word in split_words(text))
    return learn_merges_fast(WordCounts.from_mapping(words), num_merges) == learn_merges(words, num_merges)


# Few letters give many ties, overlaps ("aaaa") and neighbouring merges; words of many letters give long steps.
corpora = st.one_of(
    st.text("ab", min_size=1, max_size=300),
    st.text("ab ", min_size=1, max_size=300),
    st.text("abcde  '\n.1", min_size=1, max_size=300),
    st.text(min_size=1, max_size=100),
    st.lists(st.sampled_from(["low", "lower", "newest", "widest", " new", " aaaa", "aaa"]), min_size=1).map(
        "".join
    ),
)


@settings(max_examples=600, deadline=None)
@given(corpora, st.integers(0, 300), st.integers(1, 12) | st.just(256))
def test_fuzzed_text_the_longest_token_is_limited_and_nothing_else(text, num_merges, limit):
    words = Counter(word.encode() for word in split_words(text))
    counts = WordCounts.from_mapping(words)
    merges = learn_merges_fast(counts, num_merges, max_token_bytes=limit)
    assert merges == learn_merges(words, num_merges, max_token_bytes=limit)
    assert all(len(left + right) <= limit for left, right in merges)
    unlimited = learn_merges(words, num_merges, max_token_bytes=sys.maxsize)
    within = list(itertools.takewhile(lambda pair: len(b"".join(pair)) <= limit, unlimited))
    assert merges[: len(within)] == within


def test_many_merges_per_step():
    """Random words with skewed counts: steps of many merges, whose counts lie close together."""
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefghijklmnopqrst", k=rng.randint(1, 8))) for _ in range(400)]
    text = " ".join(rng.choices(words, weights=[1 / (i + 1) for i in range(400)], k=3000))
    assert same_merges(text, 500)


def test_counts_beyond_32_bits():
    words = WordCounts.from_mapping({b"ab": 2**33, b"cd": 2**33 + 1})
    assert learn_merges_fast(words, 2) == [(b"c", b"d"), (b"a", b"b")]


@pytest.mark.parametrize("unit", [b"a", b"ab", b"abcdefgh"])
def test_one_word_of_a_million_letters(unit):
    words = WordCounts.from_mapping({unit * (1_000_000 // len(unit)): 1})
    start = time.process_time()
    merges = learn_merges_fast(words, 12, max_token_bytes=sys.maxsize)
    assert time.process_time() - start < 30  # quadratic: hours
    whole = b"".join(merges[-1])
    assert len(merges) == 12
    assert whole == (unit * len(whole))[: len(whole)]


def test_nothing_to_learn_from():
    nothing = WordCounts(np.zeros(0, np.uint8), np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert learn_merges_fast(nothing, 5) == []
    assert learn_merges_fast(WordCounts.from_mapping({b"a": 1}), 5) == []
