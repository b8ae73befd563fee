"""Where GPT-2 cuts text into words, in its slow and obvious form. `boundaries.py` computes the same, vectorised.

Byte-level BPE never merges across these cuts, so a text is a multiset of short words: train on the counts of the
distinct ones, and encode each distinct one once.
"""

from __future__ import annotations

import functools
from enum import IntEnum

import numpy as np
import regex

PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""GPT-2's pattern (Radford et al. 2019, `encoder.py`), in the equivalent form that tiktoken uses."""

split_words = regex.compile(PATTERN).findall
"""str -> list of words. Every character lands in exactly one word."""

NUM_CODE_POINTS = 0x110000
# Planes 4 to 16 hold no letters, numbers or spaces: unassigned, tags, private use.
_FIRST_BEYOND_LETTERS = 0x40000


class CharacterClass(IntEnum):
    """All that the pattern asks of a character; SPECIAL marks the bytes of special tokens, whatever they hold."""

    OTHER = 0
    LETTER = 1
    NUMBER = 2
    SPACE = 3
    SPECIAL = 4


@functools.cache
def character_classes() -> np.ndarray:
    """Return the `CharacterClass` of every code point, uint8 (0x110000,).

    The table is asked of the regex engine itself, so that it agrees with `split_words` by construction.
    """
    # A surrogate is not a character but stands in a str well enough; bytes that are not UTF-8 are decoded to them.
    text = np.arange(_FIRST_BEYOND_LETTERS, dtype="<u4").tobytes().decode("utf-32-le", "surrogatepass")
    classes = np.zeros(NUM_CODE_POINTS, np.uint8)
    for kind, pattern in (
        (CharacterClass.LETTER, r"\p{L}+"),
        (CharacterClass.NUMBER, r"\p{N}+"),
        (CharacterClass.SPACE, r"\s+"),
    ):
        for run in regex.finditer(pattern, text):
            classes[run.start() : run.end()] = kind
    return classes
