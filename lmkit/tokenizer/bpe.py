"""Byte-pair encoding in plain Python: learn merges from word counts, and apply them to a word.

This file is the algorithm to read (Sennrich et al. 2016, algorithm 1, on bytes as in GPT-2). The fast forms are
`merge_learner.py`, which learns the same merges, and `words.c`, which applies them. Tests compare the two forms. On a
machine without a C compiler this file also does the work of `words.c`.
"""

from __future__ import annotations

import functools
import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

Pair = tuple[bytes, bytes]

_NEVER = 1 << 62  # the rank of a pair that is not merged
_LONG_WORD = 64  # bytes; for a longer word a heap is faster than looking at every pair for each merge


def learn_merges(words: Mapping[bytes, int], num_merges: int) -> list[Pair]:
    """Learn merges from the distinct words of a corpus and their counts.

    Repeat: count every pair of neighbouring tokens, take the most frequent pair (of equally frequent pairs the
    greatest, compared as bytes), and merge it in every word. Return fewer than `num_merges` merges if every word has
    become one token.

    >>> learn_merges({b"aaab": 2, b"ab": 1}, 2)
    [(b'a', b'a'), (b'a', b'b')]
    """
    splits = {word: [bytes([byte]) for byte in word] for word in words}
    merges: list[Pair] = []
    while len(merges) < num_merges:
        counts: Counter[Pair] = Counter()
        for word, tokens in splits.items():
            for pair in pairwise(tokens):
                counts[pair] += words[word]
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
        byte_ids: the token id of each of the 256 bytes.
        merges: (left id, right id, id of the merged token) in the order in which the merges were learned. The
            position of a merge is its rank.

    >>> MergeTable(range(256), [(ord("h"), ord("e"), 256), (256, ord("l"), 257)]).encode_word(b"hello")
    [257, 108, 111]
    """

    def __init__(self, byte_ids: Sequence[int], merges: Sequence[tuple[int, int, int]]) -> None:
        self.byte_ids = list(byte_ids)
        self.merges = list(merges)

    @functools.cached_property
    def _ranks(self) -> dict[tuple[int, int], int]:
        # Reversed: a pair that a file lists twice keeps its first rank.
        return {(left, right): rank for rank, (left, right, _) in reversed(list(enumerate(self.merges)))}

    def encode_word(self, word: bytes) -> list[int]:
        """Return the token ids of one word: merge the pair of lowest rank, the leftmost first, until none is left."""
        ids = [self.byte_ids[byte] for byte in word]
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
