"""Split text into words (GPT-2's pattern, or another model's) and find special tokens.

Byte-level BPE merges within words only. A corpus is therefore a multiset of short words: training needs the counts of
the distinct words, and encoding merges each distinct word once. `words.c` contains the fast form of this file.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import IntEnum

import numpy as np
import regex

from lmkit.recipe.vocabulary import END_OF_TEXT as END_OF_TEXT

PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""GPT-2's pattern (Radford et al. 2019, `encoder.py`), in the equivalent form that tiktoken uses."""

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    "gpt2": PATTERN,
    # SmolLM: every digit is a word, and so is the whole space before one.
    "digits": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+",
    "llama3": _LLAMA3,
    "qwen2": _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),
}
"""By the name of the model that introduced it. Training uses GPT-2's; tokenizers from elsewhere bring theirs."""


@functools.cache
def word_finder(pattern: str) -> Callable[[str], list[str]]:
    """Return the function that splits a text into the words of one of `PATTERNS`."""
    return regex.compile(PATTERNS[pattern]).findall


def split_words(text: str, pattern: str = "gpt2") -> list[str]:
    """Split text into words. Every character belongs to exactly one word.

    >>> split_words("I'll see 42 stars.")
    ['I', "'ll", ' see', ' 42', ' stars', '.']
    """
    return word_finder(pattern)(text)


class CharacterClass(IntEnum):
    """The only property of a character that the pattern looks at, apart from spaces and apostrophes."""

    OTHER = 0
    LETTER = 1
    NUMBER = 2
    SPACE = 3


# Planes 4 to 16 contain no letters, numbers or spaces: they are unassigned, tags or private use.
_FIRST_BEYOND_LETTERS = 0x40000


@functools.cache
def character_classes() -> np.ndarray:
    """Return the `CharacterClass` of every code point, uint8, shape (0x110000,).

    The table is computed with the regex engine, so that `words.c` agrees with `split_words`.
    """
    # Surrogates are included: bytes that are not UTF-8 are decoded to them.
    text = np.arange(_FIRST_BEYOND_LETTERS, dtype="<u4").tobytes().decode("utf-32-le", "surrogatepass")
    classes = np.zeros(0x110000, np.uint8)
    for kind, pattern in (
        (CharacterClass.LETTER, r"\p{L}+"),
        (CharacterClass.NUMBER, r"\p{N}+"),
        (CharacterClass.SPACE, r"\s+"),
    ):
        for run in regex.finditer(pattern, text):
            classes[run.start() : run.end()] = kind
    return classes


class SpecialTokens:
    """Strings that are one token each: never split, and never merged with their neighbours.

    They are found from left to right. Of several that begin at the same place the longest is taken.

    Args:
        ids: text -> token id.

    >>> list(SpecialTokens({"<|end|>": 7}).split(b"one<|end|>two"))
    [(b'one', 7), (b'two', None)]
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = dict(ids)
        # Longest first: a regular expression takes the first alternative that matches.
        texts = sorted(ids, key=lambda text: -len(text.encode()))
        self._ids = {text.encode(): ids[text] for text in texts}
        self.longest = max(map(len, self._ids), default=0)
        """Bytes of the longest special token."""
        self._pattern = re.compile(b"|".join(map(re.escape, self._ids))) if ids else None

    def only(self, allowed: Collection[str]) -> SpecialTokens:
        """Return the special tokens that are in `allowed`.

        Raises:
            ValueError: a name in `allowed` is not a special token.
        """
        unknown = sorted(set(allowed) - set(self.ids))
        if unknown:
            raise ValueError(f"no special token {unknown[0]!r}; known: {', '.join(map(repr, self.ids))}")
        return SpecialTokens({text: self.ids[text] for text in allowed})

    @functools.cached_property
    def packed(self) -> bytes:
        """The special tokens for `words.c`: id and size (int32) of each, then its bytes; longest first."""
        return b"".join(
            struct.pack("=ii", token_id, len(token)) + token for token, token_id in self._ids.items()
        )

    def split(self, data: bytes) -> Iterator[tuple[bytes, int | None]]:
        """Yield the text before each special token with the token's id, then the remaining text with None."""
        end = 0
        for match in self._pattern.finditer(data) if self._pattern else ():
            yield data[end : match.start()], self._ids[match.group()]
            end = match.end()
        yield data[end:], None

    def would_be_cut(self, data: bytes, at: int) -> bool:
        """Tell whether a cut of `data` at offset `at` would divide a special token."""
        low = max(0, at - self.longest + 1)
        around = data[low : at + self.longest - 1]
        for token in self._ids:
            start = around.find(token)
            while start >= 0:
                if low + start < at < low + start + len(token):
                    return True
                start = around.find(token, start + 1)
        return False
