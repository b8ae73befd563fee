"""Where words begin in a piece of UTF-8, by whole-array operations: `pattern.split_words` at twenty times its speed.

The pattern looks at nothing but the classes of characters, except for spaces and apostrophes. So:

1. give every byte the class of its character (`byte_classes`);
2. a word begins wherever the class changes;
3. whitespace before a word: its last character, if it is U+0020, joins the word (` ?\\p{L}+`); any other splits off
   the run on its own (`\\s+(?!\\S)` leaves it behind);
4. an apostrophe that begins a word takes s, d, m, t, ll, ve or re with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lmkit.tokenizer.pattern import CharacterClass, character_classes
from lmkit.tokenizer.special_tokens import Span

_APOSTROPHE = ord("'")
_SPACE = ord(" ")


def word_starts(data: bytes, specials: Sequence[Span] = ()) -> np.ndarray:
    """Return the offset of the first byte of every word of `data`, int64, ascending.

    Args:
        data: valid UTF-8, not empty.
        specials: the special tokens in `data`, ascending; each is one word, and the text between them is cut as if
            it stood alone.
    """
    text = np.frombuffer(data, np.uint8)
    classes = byte_classes(data)
    for special in specials:
        classes[special.start : special.end] = CharacterClass.SPECIAL
    begins = np.empty(len(text), np.bool_)
    begins[0] = True
    np.not_equal(classes[1:], classes[:-1], out=begins[1:])
    _give_last_space_to_next_word(text, classes, begins)
    _cut_contractions(text, classes, begins)
    for special in specials:  # neighbours have the same class, and no change between them
        begins[special.start] = True
    return np.flatnonzero(begins)


def byte_classes(data: bytes) -> np.ndarray:
    """Return the class of the character that each byte of `data` (valid UTF-8) belongs to, uint8."""
    table = character_classes()
    classes = np.frombuffer(bytearray(data.translate(table[:256].tobytes())), np.uint8)
    if data.isascii():
        return classes
    text = np.frombuffer(data, np.uint8)
    lead = np.flatnonzero(text >= 0xC0)
    first = text[lead].astype(np.int32)
    size = 2 + (first >= 0xE0).astype(np.int8) + (first >= 0xF0)
    code_point = first & (0x7F >> size)
    for i in (1, 2, 3):
        longer = size > i
        follow = text[np.where(longer, lead + i, 0)].astype(np.int32) & 0x3F
        code_point = np.where(longer, code_point << 6 | follow, code_point)
    kinds = table[code_point]
    for i in range(4):
        longer = size > i
        classes[lead[longer] + i] = kinds[longer]
    return classes


def _give_last_space_to_next_word(text: np.ndarray, classes: np.ndarray, begins: np.ndarray) -> None:
    # A word behind whitespace, seen from the byte before it; masks are cheaper than lists of places.
    behind_space = begins[1:] & (classes[:-1] == CharacterClass.SPACE) & (classes[1:] < CharacterClass.SPACE)
    joins = behind_space & (text[:-1] == _SPACE)
    begins[1:] ^= joins
    begins[:-1] |= joins
    behind_space ^= joins
    last = np.flatnonzero(behind_space)  # the last byte of a whitespace character, soon its first
    wide = np.flatnonzero(text[last] >= 0x80)
    for _ in range(2):  # no whitespace character has more than three bytes
        last[wide] -= text[last[wide]] & 0xC0 == 0x80
    begins[last] = True


def _cut_contractions(text: np.ndarray, classes: np.ndarray, begins: np.ndarray) -> None:
    quote = np.flatnonzero(text == _APOSTROPHE)
    quote = quote[begins[quote] & (classes[quote] == CharacterClass.OTHER)]
    for ending in (b"s", b"d", b"m", b"t", b"ll", b"ve", b"re"):
        fits = quote[quote + len(ending) < len(text)]
        for i, letter in enumerate(ending, start=1):
            fits = fits[(text[fits + i] == letter) & (classes[fits + i] == CharacterClass.LETTER)]
        begins[fits + 1] = False
        rest = fits + 1 + len(ending)
        begins[rest[rest < len(text)]] = True
