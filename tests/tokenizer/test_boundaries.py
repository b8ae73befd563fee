"""The vectorised and the compiled pre-tokenisation against the regular expression itself."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkit.tokenizer.boundaries import byte_classes, word_starts
from lmkit.tokenizer.pattern import CharacterClass, character_classes, split_words
from lmkit.tokenizer.special_tokens import SpecialTokens

# Everything on which the pattern's branches turn: spaces of one to three bytes, all parts of contractions, classes
# in characters of one to four bytes, a combining mark, and parts of a special token.
PIECES = [
    *" \n\t\r\x0b\x0c\x1c\x85\u00a0\u2003\u3000\u200b\u200d",
    *"'sdmtlvre’",
    *"aZé日𝒜߀٣½Ⅷ𝟘9",
    *".,!-_\u0301\u0000\ufeff\U0001f469",
    "'s", "'ll", "'ve", "'re", "'t", " '", "  ", "\r\n", "👩‍👩‍👧‍👦", "<|e|>", "<|", "|>",
]  # fmt: skip
texts = st.lists(st.sampled_from(PIECES), max_size=40).map("".join)


def words_by_starts(data: bytes, specials: SpecialTokens) -> list[bytes]:
    starts = [*word_starts(data, specials.find(data)).tolist(), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(starts)]


def expected_words(text: str, special: str) -> list[bytes]:
    words = []
    for i, part in enumerate(text.split(special)):
        words += ([special] if i else []) + split_words(part)
    return [word.encode() for word in words]


@settings(max_examples=1000, deadline=None)
@given(texts.filter(bool))
def test_starts_are_those_of_the_regular_expression(text: str) -> None:
    specials = SpecialTokens({"<|e|>": 0})
    assert words_by_starts(text.encode(), specials) == expected_words(text, "<|e|>")


@settings(max_examples=300, deadline=None)
@given(st.text(min_size=1))
def test_any_unicode_text(text: str) -> None:
    assert words_by_starts(text.encode(), SpecialTokens({})) == [word.encode() for word in split_words(text)]


def test_every_code_point_in_context() -> None:
    points = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    for template in ("a{}b", " {}1"):
        for first in range(0, len(points), 1 << 17):
            text = "\n".join(template.format(c) for c in points[first : first + (1 << 17)])
            starts = word_starts(text.encode())
            lengths = [len(word.encode()) for word in split_words(text)]
            np.testing.assert_array_equal(starts, np.cumsum([0, *lengths[:-1]]))


def test_real_text(real_text: str) -> None:
    assert words_by_starts(real_text.encode(), SpecialTokens({})) == [
        w.encode() for w in split_words(real_text)
    ]


def test_contractions_in_every_position() -> None:
    endings = ["s", "d", "m", "t", "ll", "ve", "re", "l", "v", "r", "x", "S", ""]
    for before, ending, after in itertools.product(
        ["", "a", " ", "'", "1", "\n"], endings, ["", "a", " ", "'", "9"]
    ):
        text = f"{before}'{ending}{after}"
        assert words_by_starts(text.encode(), SpecialTokens({})) == [w.encode() for w in split_words(text)], (
            text
        )


def test_special_tokens_are_no_part_of_contractions_or_of_words_around_them() -> None:
    for special in ("so", "l", " ", "'", "ve", "日"):
        specials = SpecialTokens({special: 0})
        for text in ("it'so", "'ll", "we'll've", "a  b", "'s's", "日 日本", "x 's"):
            assert words_by_starts(text.encode(), specials) == expected_words(text, special), (special, text)


def test_the_classes_table_covers_what_lies_beyond_its_search() -> None:
    classes = character_classes()
    rng = random.Random(0)
    for c in rng.sample(range(0x40000, 0x110000), 20_000):
        assert classes[c] == CharacterClass.OTHER
        assert split_words("a" + chr(c)) == ["a", chr(c)]


@pytest.mark.parametrize("text", ["é", "日本", "👩‍👩‍👧‍👦", "a\u00a0b", "½x", "\u3000"])
def test_every_byte_has_the_class_of_its_character(text: str) -> None:
    expected = [character_classes()[ord(c)] for c in text for _ in c.encode()]
    assert byte_classes(text.encode()).tolist() == expected
