"""Both counters of words, numpy's and the compiled one, against a Counter over the regular expression."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkit.tokenizer import native
from lmkit.tokenizer.pattern import split_words
from lmkit.tokenizer.special_tokens import SpecialTokens
from lmkit.tokenizer.word_counter import NumpyCounter, WordCounter, WordCounts

# Special tokens that begin alike, lie in one another, hold a space, and begin like ordinary words.
SPECIAL = ("<|end|>", "<|end|><|pad|>", "<|pad|>", "a b", "日本")
PIECES = [
    *SPECIAL, *" \n\t'aestdé日😀1.A[`{@Zz", "  ", "'s", "'ll", " the", "    ", "\u3000", "\u0301", "<|", "end|>",
    "abcdefg", "abcdefgh", " abcdefghi", "a" * 14, "b" * 15, "c" * 16, "d" * 17, "=" * 40, "\r\n", "👩‍👩‍👧‍👦",
]  # fmt: skip
texts = st.one_of(st.lists(st.sampled_from(PIECES), max_size=80).map("".join), st.text())


@pytest.fixture(params=["numpy", "native"])
def make_counter(request: pytest.FixtureRequest) -> Callable[[SpecialTokens], WordCounter]:
    if request.param == "numpy":
        return NumpyCounter
    code = native.library()
    if code is None:
        pytest.skip("no C compiler on this machine")
    return lambda specials: native.NativeCounter(code, specials)


def expected(text: str, special: tuple[str, ...]) -> tuple[dict[bytes, int], int]:
    pattern = "|".join(map(regex.escape, sorted(special, key=len, reverse=True)))
    parts = regex.split(pattern, text) if special else [text]
    words = Counter(word.encode() for part in parts for word in split_words(part))
    return words, len(parts) - 1


def found(words: WordCounts) -> tuple[dict[bytes, int], int]:
    pieces = [piece.tobytes() for piece in np.split(words.text, np.cumsum(words.lengths)[:-1])]
    counts = dict(zip(pieces, words.counts.tolist(), strict=True)) if len(words.lengths) else {}
    assert len(counts) == len(words.lengths)  # every word once
    return counts, words.num_special


@pytest.mark.parametrize("special", [SPECIAL, ("<|end|>",), ()])
def test_fuzzed_text(make_counter: Callable, special: tuple[str, ...]) -> None:
    specials = SpecialTokens(dict.fromkeys(special, 0))

    @settings(max_examples=400, deadline=None)
    @given(texts)
    def check(text: str) -> None:
        counter = make_counter(specials)
        counter.add(text.encode())
        assert found(counter.result()) == expected(text, special)

    check()


def test_every_code_point(make_counter: Callable) -> None:
    points = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    for template in ("ab{}cdefghijk", " {}1", "  {}  "):
        text = "\n".join(template.format(c) for c in points)
        counter = make_counter(SpecialTokens({}))
        counter.add(text.encode())
        assert found(counter.result()) == expected(text, ())


def test_many_words_in_many_pieces_counted_apart(make_counter: Callable, real_text: str) -> None:
    """Tables that grow several times, added up; words of all lengths, some of them in both halves."""
    rng = random.Random(0)
    specials = SpecialTokens({"<|endoftext|>": 0})
    words = [
        "".join(rng.choices("abcdefgé", k=rng.choice([2, 5, 7, 8, 9, 15, 16, 17, 40]))) for _ in range(40_000)
    ]
    pieces = [real_text, " ".join(words[:25_000]), " ".join(words[15_000:]), real_text[:5_000]]
    alone, one, two = (make_counter(specials) for _ in range(3))
    for i, piece in enumerate(pieces):
        alone.add(piece.encode())
        (one, two)[i % 2].add(piece.encode())
    one.absorb(two)
    one.absorb(make_counter(specials))
    total: Counter[bytes] = Counter()
    for piece in pieces:
        total.update(expected(piece, ("<|endoftext|>",))[0])
    num_special = sum(piece.count("<|endoftext|>") for piece in pieces)
    assert found(alone.result()) == found(one.result()) == (total, num_special)


def test_words_come_in_order_of_appearance(make_counter: Callable) -> None:
    counter = make_counter(SpecialTokens({}))
    counter.add(b"one two one")
    counter.add(b" three one")
    words = counter.result()
    assert words.text.tobytes() == b"one two one three"
    assert words.lengths.tolist() == [3, 4, 4, 6]
    assert words.counts.tolist() == [1, 1, 2, 1]


def test_nothing(make_counter: Callable) -> None:
    counter = make_counter(SpecialTokens({}))
    counter.add(b"")
    assert found(counter.result()) == ({}, 0)
