"""Split text into words (GPT-2's pattern, or another model's) and find special tokens.

Byte-level BPE merges within words only. A corpus is therefore a multiset of short words: training needs the counts of
the distinct words, and encoding merges each distinct word once. `words.c` contains the fast form of this file.
"""

from __future__ import annotations

import functools
import itertools
import operator
import os
import re
import unicodedata
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import regex

from lmkit.core.bpe import PATTERN as PATTERN
from lmkit.recipe import END_OF_TEXT as END_OF_TEXT

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


_SPACES = (
    "\t\n\v\f\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
)
"""The characters that `\\s` matches."""
SPACE_RUN = re.compile(b"(?:" + b"|".join(map(re.escape, map(str.encode, _SPACES))) + b")*")
_NORMAL_FORM = 8
"""Bytes of a text may become one byte of its normal form: a character of two bytes stands for at most four."""

# Planes 4 to 16 contain no letters, numbers or spaces: they are unassigned, tags or private use.
_FIRST_BEYOND_LETTERS = 0x40000


@functools.cache
def character_classes() -> np.ndarray:
    """Return the class of every code point, uint8, shape (0x110000,): 1 letter, 2 number, 3 space, 0 anything else.

    The table is computed with the regex engine, so that `words.c` agrees with `split_words`.
    """
    # Surrogates are included: bytes that are not UTF-8 are decoded to them.
    text = np.arange(_FIRST_BEYOND_LETTERS, dtype="<u4").tobytes().decode("utf-32-le", "surrogatepass")
    classes = np.zeros(0x110000, np.uint8)
    for kind, pattern in enumerate((r"\p{L}+", r"\p{N}+", r"\s+"), 1):
        for run in regex.finditer(pattern, text):
            classes[run.start() : run.end()] = kind
    return classes


def normal_form(data: bytes) -> bytes:
    """Return a text in Unicode's normal form C; bytes that are not UTF-8 stay."""
    text = unicodedata.normalize("NFC", data.decode("utf-8", "surrogateescape"))
    return text.encode("utf-8", "surrogateescape")


class AddedToken(NamedTuple):
    """A string that is one token wherever a text contains it; the fields are those of `tokenizer.json`.

    Attributes:
        special: whether the token is a mark; otherwise it is text, and is always recognized.
        normalized: whether it is searched for after Unicode's normal form was made, in what the others left.
        lstrip, rstrip: whether it takes the whitespace before, after it.
    """

    text: str
    special: bool = True
    normalized: bool = False
    lstrip: bool = False
    rstrip: bool = False


class SpecialTokens:
    """Strings that are one token each: never split, and never merged with their neighbours.

    They are found from left to right; of several that begin at the same place, the longest. Those with `normalized`
    are found in the text that the others leave. `ids`: text or `AddedToken` -> token id.

    >>> list(SpecialTokens({"<|end|>": 7}).split(b"one<|end|>two"))
    [(b'one', 7), (b'two', None)]
    """

    def __init__(self, ids: Mapping[str, int] | Mapping[AddedToken, int]) -> None:
        self.ids = {AddedToken(key) if isinstance(key, str) else key: i for key, i in ids.items()}
        self.first = _Strings({token: i for token, i in self.ids.items() if not token.normalized})
        self.second = _Strings({token: i for token, i in self.ids.items() if token.normalized})
        self.longest = max(self.first.longest, _NORMAL_FORM * self.second.longest)
        """Most bytes of a text that are one token."""

    def only(self, allowed: str | Collection[str]) -> SpecialTokens:
        """Return the tokens that are in `allowed` (a name, a collection, or "all") or are not special; ValueError: a
        name is none of these tokens."""
        if allowed == "all":
            return self
        allowed = {allowed} if isinstance(allowed, str) else set(allowed)
        known = list(map(operator.attrgetter("text"), self.ids))
        if unknown := allowed.difference(known):
            raise ValueError(f"no special token {min(unknown)!r}; known: {', '.join(map(repr, known))}")
        return SpecialTokens({t: i for t, i in self.ids.items() if not t.special or t.text in allowed})

    @functools.cached_property
    def of_normal_form(self) -> SpecialTokens:
        """The tokens to find in text in normal form."""
        return SpecialTokens({token: i for token, i in self.ids.items() if token.normalized})

    @functools.cached_property
    def packed(self) -> bytes:
        """The tokens for `words.c`."""
        return self.first.packed() + self.second.packed()

    def split(self, data: bytes) -> Iterator[tuple[bytes, int | None]]:
        """Yield the text before each special token with the token's id, then the remaining text with None."""
        for text, token_id in self.first.split(data):
            *parts, (rest, _) = self.second.split(text)
            yield from parts
            yield rest, token_id

    def would_be_cut(self, data: bytes, at: int) -> bool:
        """Tell whether a cut of `data` at offset `at` would divide a special token."""
        if not self.second.longest:
            return self.first.would_be_cut(data, at)
        left, right = (
            normal_form(data[max(0, at - self.longest) : at]),
            normal_form(data[at : at + self.longest]),
        )
        return (
            self.first.would_be_cut(data, at)
            or self.second.would_be_cut(data, at)
            or self.second.would_be_cut(left + right, len(left))
        )


class _Strings:
    """Strings with the ids of their tokens, to find in bytes."""

    def __init__(self, ids: dict[AddedToken, int]) -> None:
        self._tokens = {token.text.encode(): (token, token_id) for token, token_id in ids.items()}
        self.longest = max(map(len, self._tokens), default=0)

    @functools.cached_property
    def _pattern(self) -> re.Pattern[bytes] | None:
        return re.compile(_any_of(sorted(self._tokens))) if self._tokens else None

    def split(self, data: bytes) -> Iterator[tuple[bytes, int | None]]:
        start = 0
        for match in self._pattern.finditer(data) if self._pattern else ():
            token, token_id = self._tokens[match.group()]
            text, taken, start = data[start : match.start()], start, match.end()
            if token.lstrip:
                text = (
                    text.decode("utf-8", "surrogateescape").rstrip(_SPACES).encode("utf-8", "surrogateescape")
                )
            if token.rstrip and (spaces := SPACE_RUN.match(data, start)):
                start = spaces.end()
            if not (token.lstrip and start <= taken):  # else the token before has taken all of it
                yield text, token_id
        yield data[start:], None

    def would_be_cut(self, data: bytes, at: int) -> bool:
        low, high = max(0, at - self.longest), at + self.longest
        if self._pattern is None or not self._pattern.search(data, low, high):
            return False
        matches = (self._pattern.match(data, start, high) for start in range(low, at))
        # A token that takes the whitespace after it is divided from the whitespace.
        return any(match.end() + self._tokens[match.group()][0].rstrip > at for match in matches if match)

    def packed(self) -> bytes:
        """Return int32s, then bytes: `Strings` in `words.c` says which."""
        tokens = sorted(self._tokens)
        # Where the tokens begin that begin with each byte, and their number
        numbers = np.searchsorted(list(map(operator.itemgetter(0), tokens)), np.arange(257)).tolist()
        found = [self._tokens[text] for text in tokens]
        numbers += [token_id for _, token_id in found]
        numbers += [token.lstrip + 2 * token.rstrip for token, _ in found]
        numbers += itertools.accumulate(map(len, tokens), initial=0)
        text = b"".join(tokens)
        text += bytes(-len(text) % 4)
        head = [len(tokens), 4 * (2 + len(numbers)) + len(text)]
        return np.array([*head, *numbers], np.int32).tobytes() + text


def _any_of(words: Sequence[bytes], at: int = 0, depth: int = 50) -> bytes:
    """Return a pattern for the longest of these sorted words, without their first `at` bytes.

    Words that begin alike share a branch: a search takes no longer for many words than for a few.

    >>> _any_of([b"a", b"ab", b"ac"])
    b'a(?:b|c)?'
    """
    if not depth:  # nothing recurses without end
        return (
            b"(?:" + b"|".join(re.escape(word[at:]) for word in sorted(words, key=len, reverse=True)) + b")"
        )
    branches = []
    for first, group in itertools.groupby(words, operator.itemgetter(slice(at, at + 1))):
        alike = list(group)
        shared = len(os.path.commonprefix([alike[0], alike[-1]]))  # noqa: RUF071 - not paths
        if first:
            branches.append(re.escape(alike[0][at:shared]) + _any_of(alike, shared, depth - 1))
    if len(branches) == 1 and len(words[0]) > at:
        return branches[0]
    return b"(?:" + b"|".join(branches) + b")" + b"?" * (len(words[0]) == at) if branches else b""
