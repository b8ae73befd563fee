"""Applying the merges to words: always the pair that was learned first, of equal ones the leftmost.

`merge_word` does one word in plain Python. `merge_words` does thousands at once, for a new text brings its words
in crowds: every round merges the best pair of every word that still has one.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

_NEVER = np.iinfo(np.int32).max  # the rank of a pair that is not merged
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_LONG_WORD = 64  # pieces; beyond, looking at every pair for every merge costs more than a heap


class MergeTable:
    """The merges of a tokenizer, by token id.

    Args:
        byte_ids: token id of each of the 256 bytes.
        merges: (left id, right id, id of the merged token), in order of learning: the index is the rank.
    """

    def __init__(self, byte_ids: Sequence[int], merges: Sequence[tuple[int, int, int]]) -> None:
        self.byte_ids = np.array(byte_ids, np.int32)
        table = np.array(merges, np.int32).reshape(-1, 3)
        self.left, self.right, self.merged = np.ascontiguousarray(table.T)

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Yield (left id, right id) of each merge, in order of learning."""
        return zip(self.left.tolist(), self.right.tolist(), strict=True)

    @functools.cached_property
    def _ranks(self) -> dict[tuple[int, int], int]:
        pairs = list(self.pairs())
        # A pair that is listed twice keeps its first rank.
        return dict(zip(reversed(pairs), reversed(range(len(pairs))), strict=True))

    @functools.cached_property
    def _byte_ids_list(self) -> list[int]:
        return self.byte_ids.tolist()

    @functools.cached_property
    def _merged_list(self) -> list[int]:
        return self.merged.tolist()

    def merge_word(self, word: bytes) -> list[int]:
        """Return the token ids of one word."""
        ids = [self._byte_ids_list[byte] for byte in word]
        if len(ids) > _LONG_WORD:
            return self._merge_long(ids)
        ranks, merged = self._ranks, self._merged_list
        while len(ids) > 1:
            rank, i = min((ranks.get(pair, _NEVER), i) for i, pair in enumerate(pairwise(ids)))
            if rank == _NEVER:
                break
            ids[i : i + 2] = [merged[rank]]
        return ids

    def _merge_long(self, ids: list[int]) -> list[int]:
        """The same in n log n: a linked list of pieces, and a heap of (rank, place)."""
        ranks, merged = self._ranks, self._merged_list
        end = len(ids)
        after = list(range(1, end + 1))
        before = list(range(-1, end - 1))
        rank_at = [ranks.get(pair, _NEVER) for pair in pairwise(ids)] + [_NEVER]
        heap = [(rank, i) for i, rank in enumerate(rank_at) if rank != _NEVER]
        heapq.heapify(heap)
        while heap:
            rank, i = heapq.heappop(heap)
            if rank_at[i] != rank:
                continue
            gone = after[i]
            ids[i], ids[gone] = merged[rank], -1
            rank_at[gone] = _NEVER
            after[i] = after[gone]
            if after[i] < end:
                before[after[i]] = i
            for left in (before[i], i):
                if left < 0:
                    continue
                right = after[left]
                rank_at[left] = ranks.get((ids[left], ids[right]), _NEVER) if right < end else _NEVER
                if rank_at[left] != _NEVER:
                    heapq.heappush(heap, (rank_at[left], left))
        return [token for token in ids if token >= 0]

    # ---- many words at once

    def merge_words(self, text: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of all words, joined (int32), and how many each word has (int64).

        Args:
            text: the words, joined; uint8.
            lengths: bytes of each word, at least 1.
        """
        token = self.byte_ids[text]
        word = np.repeat(np.arange(len(lengths)), lengths)
        rank = self._rank_to_the_right(token, word, np.arange(len(token)))
        done_tokens, done_words = [], []
        while len(token):
            starts = np.flatnonzero(np.concatenate(([True], word[1:] != word[:-1])))
            size = np.diff(starts, append=len(token))
            best = np.minimum.reduceat(rank, starts)
            finished = np.repeat(best == _NEVER, size)
            if finished.any():
                done_tokens.append(token[finished])
                done_words.append(word[finished])
                token, word, rank = token[~finished], word[~finished], rank[~finished]
                size, best = size[best != _NEVER], best[best != _NEVER]
                if not len(token):
                    break
            here = np.flatnonzero(rank == np.repeat(best, size))
            if self._in_order:
                here = _without_overlaps(here)
            else:  # a merge may make a pair that comes before it: one a word, the leftmost
                here = here[np.concatenate(([True], word[here[1:]] != word[here[:-1]]))]
            token[here] = self.merged[rank[here]]
            keep = np.ones(len(token), np.bool_)
            keep[here + 1] = False
            token, word, rank = token[keep], word[keep], rank[keep]
            here -= np.arange(len(here))  # every merge to the left took one place away
            touched = np.union1d(here, here[here > 0] - 1)
            rank[touched] = self._rank_to_the_right(token, word, touched)
        words = np.concatenate([np.zeros(0, np.int64), *done_words])
        order = np.argsort(words, kind="stable")
        tokens = np.concatenate([np.zeros(0, np.int32), *done_tokens])[order]
        return tokens, np.bincount(words, minlength=len(lengths))

    @functools.cached_property
    def _in_order(self) -> bool:
        """Whether every pair comes after the merges that make its two parts, as training has it."""
        order = np.arange(len(self.merged))
        last_made = np.full(
            1 + max(array.max(initial=0) for array in (self.left, self.right, self.merged)), -1
        )
        np.maximum.at(last_made, self.merged, order)
        return bool((np.maximum(last_made[self.left], last_made[self.right]) < order).all())

    def _rank_to_the_right(self, token: np.ndarray, word: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Return the rank of the pairs (token[i], token[i + 1]) for i in places; _NEVER across words."""
        rank = np.full(len(places), _NEVER, np.int32)
        inside = np.flatnonzero(places + 1 < len(token))
        inside = inside[word[places[inside]] == word[places[inside] + 1]]
        rank[inside] = self._look_up(token[places[inside]], token[places[inside] + 1])
        return rank

    def _look_up(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        keys, ranks, shift = self._hash_table
        pair = _pair_keys(left, right)
        slot = (pair * _MULTIPLIER >> shift).view(np.int64)
        rank = np.where(keys[slot] == pair, ranks[slot], _NEVER)
        search = np.flatnonzero((keys[slot] != pair) & (keys[slot] != 0))
        slot, pair = slot[search], pair[search]
        while len(search):
            slot = (slot + 1) & (len(keys) - 1)
            found = keys[slot] == pair
            rank[search[found]] = ranks[slot[found]]
            go_on = ~found & (keys[slot] != 0)
            search, slot, pair = search[go_on], slot[go_on], pair[go_on]
        return rank

    @functools.cached_property
    def _hash_table(self) -> tuple[np.ndarray, np.ndarray, np.uint64]:
        """Open addressing: (pair keys, 0 where free; ranks; shift of the hash)."""
        pairs, first = np.unique(_pair_keys(self.left, self.right), return_index=True)
        bits = max(4, (4 * len(pairs)).bit_length())
        shift = np.uint64(64 - bits)
        keys, ranks = np.zeros(1 << bits, np.uint64), np.full(1 << bits, _NEVER, np.int32)
        slot = (pairs * _MULTIPLIER >> shift).view(np.int64)
        waiting = np.arange(len(pairs))
        while len(waiting):
            candidates = waiting[keys[slot[waiting]] == 0]
            keys[slot[candidates]] = pairs[candidates]  # of several that want one slot the last has it
            placed = candidates[keys[slot[candidates]] == pairs[candidates]]
            ranks[slot[placed]] = first[placed]
            waiting = np.setdiff1d(waiting, placed, assume_unique=True)
            slot[waiting] = (slot[waiting] + 1) & (len(keys) - 1)
        return keys, ranks, shift


def _pair_keys(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return (left.astype(np.uint64) << np.uint64(32) | right.astype(np.uint64)) + np.uint64(1)  # 0 means free


def _without_overlaps(places: np.ndarray) -> np.ndarray:
    """Of places in a row (the pairs of "aaaa" overlap) keep every other one, from the left."""
    index = np.arange(len(places))
    begins_run = np.concatenate(([True], places[1:] != places[:-1] + 1))
    run_start = np.maximum.accumulate(np.where(begins_run, index, 0))
    return places[(index - run_start) % 2 == 0]
