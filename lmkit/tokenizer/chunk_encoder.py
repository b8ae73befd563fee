"""Encoding a chunk of text: cut it into words, look each up, and run the merges only for words not seen before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from lmkit.tokenizer.boundaries import word_starts
from lmkit.tokenizer.bpe import MergeTable
from lmkit.tokenizer.pattern import split_words
from lmkit.tokenizer.special_tokens import Span, SpecialTokens
from lmkit.tokenizer.word_table import WordTable, joined

_MOST_WORDS = 1 << 20  # then the tables start over: memory stays bounded on endless text
_MOST_TOKENS = 1 << 23
_SHORT_TEXT = 1 << 12  # bytes: up to here a dict of words beats setting up array operations
_MOST_KNOWN = 1 << 16  # words of short texts
_LONGEST_IN_CROWD = 256  # bytes; longer words are merged one by one


class ChunkEncoder(Protocol):
    """Turns chunks of text into ids. Keeps what it learns about words: use one per thread."""

    def encode(self, data: bytes, specials: SpecialTokens) -> np.ndarray:
        """Return the ids of `data`, valid UTF-8 in which `specials` count as special tokens, as int32."""
        ...


class NumpyEncoder:
    """The encoder in numpy: no compiler needed."""

    def __init__(self, merges: MergeTable) -> None:
        self._merges = merges
        self._known: dict[str, list[int]] = {}
        self._start_over()

    def _start_over(self) -> None:
        # Words are numbered by the table; the tokens of word number n are tokens[first[n] : first[n] + size[n]].
        self._words = WordTable()
        self._first = np.zeros(1 << 16, np.int32)
        self._size = np.zeros(1 << 16, np.int32)
        self._tokens = np.zeros(1 << 18, np.int32)
        self._num_words = 0
        self._num_tokens = 0

    def encode(self, data: bytes, specials: SpecialTokens) -> np.ndarray:
        spans = specials.find(data)
        if len(data) <= _SHORT_TEXT or not data:
            return self._encode_short(data, spans)
        if self._num_words > _MOST_WORDS or self._num_tokens > _MOST_TOKENS:
            self._start_over()
        starts = word_starts(data, spans)
        lengths = np.diff(starts, append=len(data))
        if not spans:
            return self._encode_words(data, starts, lengths)[0]
        special = np.searchsorted(starts, [span.start for span in spans])
        ordinary = np.ones(len(starts), np.bool_)
        ordinary[special] = False
        tokens, sizes = self._encode_words(data, starts[ordinary], lengths[ordinary])
        # Special token number i stands behind the tokens of the words before it.
        ends = np.concatenate(([0], np.cumsum(sizes)))
        return np.insert(tokens, ends[special - np.arange(len(special))], [span.token_id for span in spans])

    def _encode_short(self, data: bytes, spans: Sequence[Span]) -> np.ndarray:
        ids: list[int] = []
        end = 0
        for start, stop, token_id in [*spans, (len(data), len(data), None)]:
            for word in split_words(data[end:start].decode()):
                found = self._known.get(word)
                if found is None:
                    found = self._merges.merge_word(word.encode())
                    if len(self._known) < _MOST_KNOWN:
                        self._known[word] = found
                ids += found
            if token_id is not None:
                ids.append(token_id)
            end = stop
        return np.array(ids, np.int32)

    def _encode_words(
        self, data: bytes, starts: np.ndarray, lengths: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        if not len(starts):
            return np.zeros(0, np.int32), np.zeros(0, np.int32)
        numbers, new = self._words.look_up(data, starts, lengths)
        if len(new.lengths):
            self._learn(new.text, new.lengths)
        sizes = self._size[numbers]
        return joined(self._tokens, self._first[numbers], sizes), sizes

    def _learn(self, text: np.ndarray, lengths: np.ndarray) -> None:
        """Merge new words and remember their tokens."""
        numbers = np.arange(self._num_words, self._num_words + len(lengths))
        self._num_words += len(lengths)
        self._first = _with_room(self._first, self._num_words)
        self._size = _with_room(self._size, self._num_words)
        ends = np.cumsum(lengths)
        in_crowd = lengths <= _LONGEST_IN_CROWD
        if in_crowd.all():
            self._remember(numbers, *self._merges.merge_words(text, lengths))
            return
        for i in np.flatnonzero(~in_crowd).tolist():
            tokens = self._merges.merge_word(text[ends[i] - lengths[i] : ends[i]].tobytes())
            self._remember(numbers[i : i + 1], np.array(tokens, np.int32), np.array([len(tokens)]))
        if in_crowd.any():
            crowd = joined(text, (ends - lengths)[in_crowd], lengths[in_crowd])
            self._remember(numbers[in_crowd], *self._merges.merge_words(crowd, lengths[in_crowd]))

    def _remember(self, numbers: np.ndarray, tokens: np.ndarray, sizes: np.ndarray) -> None:
        first = self._num_tokens
        self._num_tokens += len(tokens)
        self._tokens = _with_room(self._tokens, self._num_tokens)
        self._tokens[first : self._num_tokens] = tokens
        self._first[numbers] = first + np.cumsum(sizes) - sizes
        self._size[numbers] = sizes


def _with_room(array: np.ndarray, size: int) -> np.ndarray:
    if size <= len(array):
        return array
    return np.concatenate((array, np.zeros(max(size - len(array), len(array)), array.dtype)))
