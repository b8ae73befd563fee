"""Count words and encode texts in Python: what `words.c` does, on a machine without a C compiler.

`lmkit.core.bpe` has the algorithm to read. Tests compare the forms.
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np

from lmkit.core import bpe
from lmkit.core.bpe import NEVER
from lmkit.tokenizer.pretokenize import SpecialTokens, split_words, word_finder

_LONG_WORD = 64  # bytes; for a longer word a heap is faster than looking at every pair for each merge
_MOST_WORDS = 1 << 20  # that a PythonEncoder remembers
_LONGEST_REMEMBERED = 1 << 12  # characters


class MergeTable(bpe.MergeTable):
    """`lmkit.core.bpe.MergeTable`, also of tokenizers from elsewhere, and fast for long words.

    Args:
        byte_ids: the token id of each of the 256 bytes; -1 for a byte that is left out, -2 - i if a run of such
            bytes is the token i.
        merges: as of the core's.
        pattern: finds words, see `PATTERNS`.
        whole: words that are tokens without any merge -> id.
        nfc: whether texts are put into Unicode's normal form C first.
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
        super().__init__(byte_ids, merges)
        self._lacks_bytes = min(self.byte_ids) < 0
        self.pattern = pattern
        self.whole = whole or {}
        self.nfc = nfc

    def encode_word(self, word: bytes) -> list[int]:
        """Return the token ids of one word."""
        if (whole := self.whole.get(word)) is not None:
            return [whole]
        ids = [self.byte_ids[byte] for byte in word]
        if self._lacks_bytes:
            runs = [(i, before) for before, i in pairwise([0, *ids])]
            ids = [i if i >= 0 else -2 - i for i, before in runs if i >= 0 or i < -1 <= before]
        return self._encode_long(ids) if len(ids) > _LONG_WORD else self.merge(ids)

    def _encode_long(self, ids: list[int]) -> list[int]:
        """Do the same in n log n steps: a linked list of tokens, and a heap of (rank, place of the left token)."""
        end = len(ids)
        following = list(range(1, end + 1))
        previous = list(range(-1, end - 1))
        rank_at = [self.ranks.get(pair, NEVER) for pair in pairwise(ids)] + [NEVER]
        heap = [(rank, i) for i, rank in enumerate(rank_at) if rank != NEVER]
        heapq.heapify(heap)
        while heap:
            rank, i = heapq.heappop(heap)
            if rank_at[i] != rank:  # an earlier merge has changed this pair
                continue
            second = following[i]
            ids[i], ids[second] = self.merges[rank][2], -1
            rank_at[second] = NEVER
            following[i] = following[second]
            if following[i] < end:
                previous[following[i]] = i
            for left in (previous[i], i):
                if left < 0:
                    continue
                right = following[left]
                rank_at[left] = self.ranks.get((ids[left], ids[right]), NEVER) if right < end else NEVER
                if rank_at[left] != NEVER:
                    heapq.heappush(heap, (rank_at[left], left))
        return [token for token in ids if token >= 0]


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
