"""Byte-pair encoding in plain Python: count words, learn merges from the counts, and encode text with them.

This file is the algorithm to read (Sennrich et al. 2016, algorithm 1, on bytes as in GPT-2). The fast forms are
`merge_learner.py`, which learns the same merges, and `words.c`, which counts and encodes. Tests compare the two
forms. On a machine without a C compiler `PythonCounter` and `PythonEncoder` do the work of `words.c`.
"""

from __future__ import annotations

import functools
import heapq
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np

from lmkit.recipe.vocabulary import MAX_TOKEN_BYTES
from lmkit.tokenizer.pretokenize import SpecialTokens, split_words, word_finder

Pair = tuple[bytes, bytes]

_NEVER = 1 << 62  # the rank of a pair that is not merged
_LONG_WORD = 64  # bytes; for a longer word a heap is faster than looking at every pair for each merge
_MOST_WORDS = 1 << 20  # that a PythonEncoder remembers
_LONGEST_REMEMBERED = 1 << 12  # characters


def learn_merges(
    words: Mapping[bytes, int], num_merges: int, *, max_token_bytes: int = MAX_TOKEN_BYTES
) -> list[Pair]:
    """Learn merges from the distinct words of a corpus and their counts.

    Repeat: count every pair of neighbouring tokens, take the most frequent pair (of equally frequent pairs the
    greatest, compared as bytes), and merge it in every word. A pair of more than `max_token_bytes` bytes is not
    merged. Return fewer than `num_merges` merges if no pair is left.

    >>> learn_merges({b"aaab": 2, b"ab": 1}, 2)
    [(b'a', b'a'), (b'a', b'b')]
    """
    splits = {word: [bytes([byte]) for byte in word] for word in words}
    merges: list[Pair] = []
    while len(merges) < num_merges:
        counts: Counter[Pair] = Counter()
        for word, tokens in splits.items():
            for left, right in pairwise(tokens):
                if len(left + right) <= max_token_bytes:
                    counts[left, right] += words[word]
        if not counts:
            break
        best = max(counts, key=lambda pair: (counts[pair], pair))
        merges.append(best)
        for tokens in splits.values():
            merge_pair(tokens, best)
    return merges


def merge_pair(tokens: list[bytes], pair: Pair) -> None:
    """Replace every occurrence of `pair` by one token, from left to right, in place.

    >>> tokens = [b"a", b"a", b"a", b"b"]
    >>> merge_pair(tokens, (b"a", b"a"))
    >>> tokens
    [b'aa', b'a', b'b']
    """
    i = 0
    while i < len(tokens) - 1:
        if (tokens[i], tokens[i + 1]) == pair:
            tokens[i : i + 2] = [pair[0] + pair[1]]
        i += 1


class MergeTable:
    """The merges of a tokenizer by token id; encodes single words.

    Args:
        byte_ids: the token id of each of the 256 bytes; -1 for a byte that is left out, -2 - i if a run of such
            bytes is the token i.
        merges: (left id, right id, id of the merged token) in the order in which the merges were learned. The
            position of a merge is its rank.
        pattern: finds words, see `PATTERNS`.
        whole: words that are tokens without any merge -> id.
        nfc: whether texts are put into Unicode's normal form C first.

    >>> MergeTable(range(256), [(ord("h"), ord("e"), 256), (256, ord("l"), 257)]).encode_word(b"hello")
    [257, 108, 111]
    """

    def __init__(
        self,
        byte_ids: Sequence[int],
        merges: Sequence[tuple[int, int, int]],
        *,
        pattern: str = "gpt2",
        whole: Mapping[bytes, int] | None = None,
        nfc: bool = False,
    ) -> None:
        self.byte_ids = list(byte_ids)
        self._lacks_bytes = min(self.byte_ids) < 0
        self.merges = list(merges)
        self.pattern = pattern
        self.whole = whole or {}
        self.nfc = nfc

    @functools.cached_property
    def _ranks(self) -> dict[tuple[int, int], int]:
        # Reversed: a pair that a file lists twice keeps its first rank.
        return {(left, right): rank for rank, (left, right, _) in reversed(list(enumerate(self.merges)))}

    def encode_word(self, word: bytes) -> list[int]:
        """Return the token ids of one word: merge the pair of lowest rank, the leftmost first, until none is left."""
        if (whole := self.whole.get(word)) is not None:
            return [whole]
        ids = [self.byte_ids[byte] for byte in word]
        if self._lacks_bytes:
            runs = [(i, before) for before, i in pairwise([0, *ids])]
            ids = [i if i >= 0 else -2 - i for i, before in runs if i >= 0 or i < -1 <= before]
        if len(ids) > _LONG_WORD:
            return self._encode_long(ids)
        while len(ids) > 1:
            rank, i = min((self._ranks.get(pair, _NEVER), i) for i, pair in enumerate(pairwise(ids)))
            if rank == _NEVER:
                break
            ids[i : i + 2] = [self.merges[rank][2]]
        return ids

    def _encode_long(self, ids: list[int]) -> list[int]:
        """Do the same in n log n steps: a linked list of tokens, and a heap of (rank, place of the left token)."""
        end = len(ids)
        following = list(range(1, end + 1))
        previous = list(range(-1, end - 1))
        rank_at = [self._ranks.get(pair, _NEVER) for pair in pairwise(ids)] + [_NEVER]
        heap = [(rank, i) for i, rank in enumerate(rank_at) if rank != _NEVER]
        heapq.heapify(heap)
        while heap:
            rank, i = heapq.heappop(heap)
            if rank_at[i] != rank:  # an earlier merge has changed this pair
                continue
            second = following[i]
            ids[i], ids[second] = self.merges[rank][2], -1
            rank_at[second] = _NEVER
            following[i] = following[second]
            if following[i] < end:
                previous[following[i]] = i
            for left in (previous[i], i):
                if left < 0:
                    continue
                right = following[left]
                rank_at[left] = self._ranks.get((ids[left], ids[right]), _NEVER) if right < end else _NEVER
                if rank_at[left] != _NEVER:
                    heapq.heappush(heap, (rank_at[left], left))
        return [token for token in ids if token >= 0]


# ---- texts


@dataclass(frozen=True)
class WordCounts:
    """The distinct words of a corpus.

    Attributes:
        text: all words, joined; uint8.
        lengths: bytes of each word; int64.
        counts: occurrences of each word; int64.
        num_special: occurrences of special tokens, which belong to no word.
    """

    text: np.ndarray
    lengths: np.ndarray
    counts: np.ndarray
    num_special: int = 0

    @classmethod
    def from_mapping(cls, words: Mapping[bytes, int], num_special: int = 0) -> WordCounts:
        return cls(
            text=np.frombuffer(b"".join(words), np.uint8),
            lengths=np.array([len(word) for word in words], np.int64),
            counts=np.array(list(words.values()), np.int64),
            num_special=num_special,
        )


class PythonCounter:
    """Counts the words of chunks of UTF-8 text, which are cut as `chunks.exact_chunks` does."""

    def __init__(self, specials: SpecialTokens) -> None:
        self._specials = specials
        self._words: Counter[str] = Counter()
        self._num_special = 0

    def add(self, data: bytes) -> None:
        """Count the words of a chunk."""
        for text, special_id in self._specials.split(data):
            self._words.update(split_words(text.decode()))
            self._num_special += special_id is not None

    def absorb(self, other: PythonCounter) -> None:
        """Add the counts of another counter."""
        self._words.update(other._words)
        self._num_special += other._num_special

    def result(self) -> WordCounts:
        """Return the words in the order of their first appearance."""
        counts = {word.encode(): count for word, count in self._words.items()}
        return WordCounts.from_mapping(counts, self._num_special)


class PythonEncoder:
    """Encodes chunks of text. Accepts bytes that are not UTF-8: each counts as a punctuation mark.

    >>> encoder = PythonEncoder(MergeTable(range(256), [(ord("h"), ord("i"), 256)]))
    >>> encoder.encode(b"hi<|end|>", SpecialTokens({"<|end|>": 257})).tolist()
    [256, 257]
    """

    def __init__(self, merges: MergeTable) -> None:
        self._known = _KnownWords(merges)
        self._find_words = word_finder(merges.pattern)

    def encode(self, data: bytes, specials: SpecialTokens) -> np.ndarray:
        """Return the ids of a chunk, int32; only `specials` count as special tokens."""
        if len(self._known) > _MOST_WORDS:  # memory stays bounded on endless text
            self._known.clear()
        ids = array("i")
        for text, special_id in specials.split(data):
            words = self._find_words(text.decode("utf-8", "surrogateescape"))
            ids.extend(chain.from_iterable(map(self._known.__getitem__, words)))
            if special_id is not None:
                ids.append(special_id)
        return np.array(ids, np.int32)


class _KnownWords(dict[str, list[int]]):
    """word -> ids; a word that is not there is merged, and remembered unless it is very long."""

    def __init__(self, merges: MergeTable) -> None:
        super().__init__()
        self._merges = merges

    def __missing__(self, word: str) -> list[int]:
        ids = self._merges.encode_word(word.encode("utf-8", "surrogateescape"))
        if len(word) <= _LONGEST_REMEMBERED:
            self[word] = ids
        return ids
