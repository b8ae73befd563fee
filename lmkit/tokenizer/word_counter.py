"""How often each distinct word occurs in chunks of text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from lmkit.tokenizer.boundaries import word_starts
from lmkit.tokenizer.special_tokens import SpecialTokens
from lmkit.tokenizer.word_table import NewWords, WordTable

if TYPE_CHECKING:
    from typing import Self

_TABLE_CAPACITY = 1 << 19  # room for the 200,000 distinct words of real text before the table grows
_PENDING_WORDS = 1 << 21


@dataclass(frozen=True)
class WordCounts:
    """The distinct words of a corpus."""

    text: np.ndarray
    """All of them, joined; uint8."""
    lengths: np.ndarray
    """Bytes of each; int64."""
    counts: np.ndarray
    """Occurrences of each; int64."""
    num_special: int
    """Occurrences of special tokens, which are in no word."""


class WordCounter(Protocol):
    """Counts the words of chunks of text; for one thread."""

    def add(self, data: bytes) -> None:
        """Count the words of `data`: valid UTF-8, cut from its neighbours as `chunks` does."""
        ...

    def absorb(self, other: Self) -> None:
        """Add what another counter of the same kind has counted."""
        ...

    def result(self) -> WordCounts:
        """Return the words in order of their first appearance."""
        ...


class NumpyCounter:
    """The counter in numpy: no compiler needed."""

    def __init__(self, specials: SpecialTokens) -> None:
        self._specials = specials
        self._table = WordTable(_TABLE_CAPACITY)
        self._words: list[NewWords] = []
        self._counts = np.zeros(0, np.int64)
        self._pending: list[np.ndarray] = []
        self._num_pending = 0
        self._num_special = 0

    def add(self, data: bytes) -> None:
        if not data:
            return
        spans = self._specials.find(data)
        starts = word_starts(data, spans)
        lengths = np.diff(starts, append=len(data))
        if spans:
            self._num_special += len(spans)
            keep = np.ones(len(starts), np.bool_)
            keep[np.searchsorted(starts, [span.start for span in spans])] = False
            starts, lengths = starts[keep], lengths[keep]
        numbers, new = self._table.look_up(data, starts, lengths)
        self._words.append(new)
        self._pending.append(numbers)
        self._num_pending += len(numbers)
        if self._num_pending > _PENDING_WORDS:
            self._settle()

    def absorb(self, other: Self) -> None:
        self._settle()
        words = other.result()
        self._num_special += words.num_special
        if not len(words.lengths):
            return
        ends = np.cumsum(words.lengths)
        numbers, new = self._table.look_up(words.text.tobytes(), ends - words.lengths, words.lengths)
        self._words.append(new)
        self._counts = np.concatenate((self._counts, np.zeros(len(new.lengths), np.int64)))
        self._counts[numbers] += words.counts  # the words of `other` are distinct

    def result(self) -> WordCounts:
        self._settle()
        return WordCounts(
            text=np.concatenate([new.text for new in self._words] or [np.zeros(0, np.uint8)]),
            lengths=np.concatenate([new.lengths for new in self._words] or [np.zeros(0, np.int64)]),
            counts=self._counts,
            num_special=self._num_special,
        )

    def _settle(self) -> None:
        """Turn the numbers seen since the last time into counts; many at once, for a pass costs the whole table."""
        counts = np.bincount(
            np.concatenate([np.zeros(0, np.int32), *self._pending]), minlength=self._table.num_words
        )
        counts[: len(self._counts)] += self._counts
        self._counts = counts
        self._pending, self._num_pending = [], 0
