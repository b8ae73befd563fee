"""Learn merges from word counts with array operations: the fast form of `core.bpe.learn_merges`.

Three ideas:

**Count once.** A merge changes only the counts of pairs around it. All distinct words lie in one array of slots, with
a separator between words. A merged pair keeps its token in the left slot; the right slot leaves a linked list. For
each pair the count and the places are known. A pair that arises later contains the new token, so it was never known
before, and the count of a known pair never rises.

**A lazy heap** yields the pairs in order of (count, bytes). Counts only fall, so an outdated entry is noticed when it
reaches the top; it goes back with its current count.

**Many merges per step.** An array operation costs nearly the same for one pair as for fifty. A step takes the next
pairs in order and keeps the longest prefix that would be merged in exactly this order one by one:

1. no occurrence of a kept pair overlaps an occurrence of another, so that the first merge leaves the count of the
   second unchanged; and
2. every pair that these merges could create has a lower count than each kept pair that is still to come. An upper
   bound of the new count is enough: the weights of a pair's occurrences, summed by the token to the left (or right).

A pair of equal tokens may overlap itself ("aaaa"). It is merged alone, at every other place of a run.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from lmkit.core.bpe import Pair
from lmkit.errors import LmkitError
from lmkit.recipe import MAX_TOKEN_BYTES, MAX_VOCABULARY, NUM_BYTES
from lmkit.tokenizer.engine import WordCounts

_NO_TOKEN = MAX_VOCABULARY  # the token of separators and of slots that a merge has emptied
_TOKEN_BITS = 20
_SLOT_BITS = 31
_LONGEST_STEP = 128  # pairs
_WORK_PER_STEP = 3000  # occurrences; longer arrays make numpy no faster
_BUCKETS = 64  # neighbours are counted in this many buckets; sharing one only raises the bound
_NOT_IN_STEP = 1 << 20


# A heap entry: -count, both tokens as strings that sort in the opposite order of their bytes, and the number of the
# pair. heapq takes the smallest.
_Candidate = tuple[int, str, str, int]


class _Occurrences(NamedTuple):
    """The occurrences of the pairs of a step, grouped by pair, with neighbours: before, first + second, after."""

    rank: np.ndarray  # position of the pair in the step, ascending
    before: np.ndarray  # slot
    first: np.ndarray  # slot; ascending within a pair
    second: np.ndarray  # slot
    after: np.ndarray  # slot
    pair_before: np.ndarray  # number of the pair (before, first); 0: none
    pair_after: np.ndarray  # number of the pair (second, after); 0: none
    weight: np.ndarray  # occurrences of the word in the corpus

    def at(self, index: np.ndarray | slice) -> _Occurrences:
        return _Occurrences._make(map(itemgetter(index), self))


def learn_merges_fast(
    words: WordCounts,
    num_merges: int,
    progress: Callable[[int, int], None] | None = None,
    *,
    max_token_bytes: int = MAX_TOKEN_BYTES,
) -> list[Pair]:
    """Learn merges from the distinct words of a corpus, at most 2 GiB; returns what `core.bpe.learn_merges` does.

    `progress` is called with (merges learned, merges wanted) after each step.
    """
    if num_merges <= 0 or not len(words.lengths):
        return []
    learner = _Learner(words, num_merges, max_token_bytes)
    while len(learner.merges) < num_merges and learner.step(num_merges - len(learner.merges)):
        if progress is not None:
            progress(len(learner.merges), num_merges)
    return learner.merges


class _Learner:
    """The words in slots, the pairs with their counts and places, and the merges so far."""

    def __init__(self, words: WordCounts, num_merges: int, max_token_bytes: int) -> None:
        num_slots = len(words.text) + len(words.lengths) + 1
        if num_slots >= 1 << _SLOT_BITS:
            message = "the distinct words of the corpus exceed 2 GiB"
            raise LmkitError("tokenizer.corpus_too_large", message, hint="train on less text")
        self.merges: list[Pair] = []
        self._token_bytes = [bytes([byte]) for byte in range(NUM_BYTES)]
        # Each byte is inverted, and the end sorts last.
        self._token_order = [chr(255 - byte) + "\u0100" for byte in range(NUM_BYTES)]
        self._token_size = np.ones(NUM_BYTES + num_merges, np.int64)
        self._longest, self._max_token_bytes = 1, max_token_bytes

        # Slots: | separator | word | separator | word | ... | separator |
        in_word = np.ones(num_slots, np.bool_)
        in_word[0] = False
        in_word[np.cumsum(words.lengths + 1)] = False
        # The fields of a slot are read together, and share a cache line. pair_at: the pair that begins here; 0: none.
        fields = ("token", "next", "previous", "pair_at")
        slots = np.zeros(num_slots, list(zip(fields, [np.int32] * 4, strict=True)))
        self._token, self._next, self._previous, self._pair_at = map(slots.__getitem__, fields)
        self._token[:] = _NO_TOKEN
        self._token[in_word] = words.text
        self._next[:-1] = np.arange(1, num_slots, dtype=np.int32)
        self._next[-1] = num_slots - 1
        self._previous[1:] = np.arange(num_slots - 1, dtype=np.int32)
        self._weight = np.repeat(words.counts, words.lengths + 1)  # the last separator has no weight

        # Pair number -> tokens, count, and places[first[pair] : first[pair + 1]], some of which are outdated.
        self._num_pairs = 1
        self._left = np.zeros(1 << 16, np.int32)
        self._right = np.zeros(1 << 16, np.int32)
        self._count = np.zeros(1 << 16, np.int64)
        self._first = np.zeros(1 << 16, np.int64)
        self._step_rank = np.full(1 << 16, _NOT_IN_STEP, np.int32)
        self._places = np.empty(2 * num_slots, np.int32)

        starts = np.flatnonzero(in_word[:-1] & in_word[1:])
        self._add_pairs(starts, self._token[starts].astype(np.int64) << _TOKEN_BITS | self._token[starts + 1])

        # The heap holds every pair whose count is at least `floor`; the others wait until the heap is empty.
        self._heap: list[_Candidate] = []
        self._floor = int(self._count.max()) + 1
        self._step_size = 1

    def step(self, limit: int) -> bool:
        """Do the next merges, at most `limit`. Return False if no pair is left."""
        chosen = self._next_candidates(min(self._step_size, limit))
        if not chosen:
            return False
        pairs = np.array(list(map(itemgetter(3), chosen)))
        found = self._occurrences(pairs)
        keep = self._certain(pairs, found) if len(pairs) > 1 else 1
        self._step_size = min(_LONGEST_STEP, 2 * keep + 2)
        if keep < len(pairs):
            for candidate in chosen[keep:]:
                heapq.heappush(self._heap, candidate)
            pairs = pairs[:keep]
            found = found.at(slice(int(np.searchsorted(found.rank, keep))))
        if keep == 1 and self._left[pairs[0]] == self._right[pairs[0]]:
            # Of the occurrences of "aa" in "aaaa" keep the first and the third, not the one in between.
            index = np.arange(len(found.first))
            begins_run = np.concatenate(([True], found.second[:-1] != found.first[1:]))
            run_start = np.maximum.accumulate(np.where(begins_run, index, 0))
            found = found.at((index - run_start) % 2 == 0)
        self._merge(pairs, found)
        return True

    def _next_candidates(self, wanted: int) -> list[_Candidate]:
        """Take the next pairs off the heap, in order of their current counts."""
        chosen: list[_Candidate] = []
        work = 0
        while len(chosen) < wanted and work < _WORK_PER_STEP:
            if not self._heap:
                counts = self._count[: self._num_pairs]
                top = int(counts.max())
                if chosen or top == 0:  # a pair that no longer occurs must not be merged
                    break
                ceiling = self._floor
                self._floor = max(1, min(ceiling, top + 1) * 5 // 8)
                waiting = np.flatnonzero((counts >= self._floor) & (counts < ceiling))
                self._heap = self._candidates(waiting)
                heapq.heapify(self._heap)
                continue
            negative_count, left, right, pair = candidate = heapq.heappop(self._heap)
            count = self._count.item(pair)
            if count == -negative_count:
                chosen.append(candidate)
                work += self._first.item(pair + 1) - self._first.item(pair)
            elif count >= self._floor:
                heapq.heappush(self._heap, (-count, left, right, pair))
        return chosen

    def _candidates(self, pairs: np.ndarray) -> list[_Candidate]:
        left = map(self._token_order.__getitem__, self._left[pairs].tolist())
        right = map(self._token_order.__getitem__, self._right[pairs].tolist())
        return list(zip((-self._count[pairs]).tolist(), left, right, pairs.tolist(), strict=True))

    def _occurrences(self, pairs: np.ndarray) -> _Occurrences:
        begin, end = self._first[pairs], self._first[pairs + 1]
        places = list(map(self._places.__getitem__, map(slice, begin.tolist(), end.tolist())))
        # The large arrays hold int32; numpy indexes fastest with int64.
        first = np.concatenate(places).astype(np.int64)
        current = np.flatnonzero(self._pair_at[first] == np.repeat(pairs, end - begin))
        first = first[current]
        before, second = self._previous[first].astype(np.int64), self._next[first].astype(np.int64)
        return _Occurrences(
            rank=np.repeat(np.arange(len(pairs)), end - begin)[current],
            before=before,
            first=first,
            second=second,
            after=self._next[second].astype(np.int64),
            pair_before=self._pair_at[before].astype(np.int64),
            pair_after=self._pair_at[second].astype(np.int64),
            weight=self._weight[first],
        )

    def _certain(self, pairs: np.ndarray, found: _Occurrences) -> int:
        """Return how many of the chosen pairs, at least one, would be merged in this order one by one."""
        # 1. Of two pairs that overlap, the later one has to wait. Looking to the left is enough: an overlap to the
        # right is the other pair's overlap to the left.
        self._step_rank[pairs] = np.arange(len(pairs))
        overlapping = self._step_rank[found.pair_before]
        self._step_rank[pairs] = _NOT_IN_STEP
        keep = max(1, min(len(pairs), int(np.maximum(found.rank, overlapping).min())))

        # 2. No newly created pair may overtake a chosen pair.
        neighbour = self._token[np.concatenate((found.before, found.after))]
        group = np.concatenate((found.rank, found.rank + len(pairs))) * _BUCKETS + (neighbour & _BUCKETS - 1)
        weight = np.concatenate((found.weight, found.weight)) * (neighbour != _NO_TOKEN)
        # bincount sums in float64, which is exact up to 2**53 occurrences.
        bound = np.bincount(group, weight, 2 * len(pairs) * _BUCKETS)
        most = np.maximum.accumulate(bound.reshape(2, len(pairs), _BUCKETS).max(axis=(0, 2)))
        overtaken = np.flatnonzero(most[:-1] >= self._count[pairs[1:]])
        return min(keep, int(overtaken[0]) + 1) if len(overtaken) else keep

    def _merge(self, pairs: np.ndarray, found: _Occurrences) -> None:
        first_new = NUM_BYTES + len(self.merges)
        for left_id, right_id in zip(self._left[pairs].tolist(), self._right[pairs].tolist(), strict=True):
            left_bytes, right_bytes = self._token_bytes[left_id], self._token_bytes[right_id]
            self._token_size[len(self._token_bytes)] = size = len(left_bytes) + len(right_bytes)
            self._longest = max(self._longest, size)
            self.merges.append((left_bytes, right_bytes))
            self._token_bytes.append(left_bytes + right_bytes)
            self._token_order.append(self._token_order[left_id][:-1] + self._token_order[right_id])
        first, second, after = found.first, found.second, found.after
        self._token[first] = first_new + found.rank
        self._token[second] = _NO_TOKEN
        left, right = self._token[found.before], self._token[after]

        # The pairs (second, after) and (before, first) are gone. If `before` was the second slot of another merge,
        # its pair with `first` was already subtracted as that merge's (second, after).
        np.subtract.at(self._count, found.pair_after, found.weight)
        np.subtract.at(self._count, found.pair_before, found.weight * (left != _NO_TOKEN))
        self._count[pairs] = 0
        self._count[0] = 0

        self._next[first] = after
        self._previous[after] = first
        self._pair_at[first] = 0
        self._pair_at[second] = 0

        # The new pairs. Two neighbouring new tokens make one pair, which the left token adds.
        has_left, has_right = np.flatnonzero(left < first_new), np.flatnonzero(right != _NO_TOKEN)
        # A group is (rank of the new token, its side of the pair, the other token).
        group = 2 * found.rank << _TOKEN_BITS
        groups = np.concatenate(((group | right | 1 << _TOKEN_BITS)[has_right], (group | left)[has_left]))
        added = self._add_pairs(np.concatenate((first[has_right], found.before[has_left])), groups)
        for candidate in self._candidates(added[self._count[added] >= self._floor]):
            heapq.heappush(self._heap, candidate)

    def _add_pairs(self, places: np.ndarray, groups: np.ndarray) -> np.ndarray:
        """Add one pair for each distinct group; return the numbers of the new pairs.

        `places`: slots at which a new pair begins; `groups`: integers below 2**32, equal for equal pairs.
        """
        if not len(places):
            return places
        keys = groups << _SLOT_BITS | places
        keys.sort()
        groups, places = keys >> _SLOT_BITS, keys & (1 << _SLOT_BITS) - 1
        edges = np.flatnonzero(np.concatenate(([True], groups[1:] != groups[:-1])))
        first, end = self._num_pairs, self._num_pairs + len(edges)
        used = self._first.item(first)
        if end + 1 > len(self._count):
            self._left, self._right = _grown(self._left, end + 1), _grown(self._right, end + 1)
            self._count, self._first = _grown(self._count, end + 1), _grown(self._first, end + 1)
            self._step_rank = np.full(len(self._count), _NOT_IN_STEP, np.int32)
        if used + len(places) > len(self._places):
            self._places = _grown(self._places, used + len(places))
        self._first[first:end] = used + edges
        self._first[end] = used + len(places)
        self._places[used : used + len(places)] = places
        numbers = np.arange(first, end)
        sizes = self._first[first + 1 : end + 1] - self._first[first:end]
        self._pair_at[places] = np.repeat(numbers.astype(np.int32), sizes)
        example = places[edges]
        self._left[first:end] = self._token[example]
        self._right[first:end] = self._token[self._next[example]]
        self._count[first:end] = np.add.reduceat(self._weight[places], edges)
        if 2 * self._longest > self._max_token_bytes:
            sizes = self._token_size[self._left[first:end]] + self._token_size[self._right[first:end]]
            self._count[first:end] *= sizes <= self._max_token_bytes  # a pair of count 0 is never merged
        self._num_pairs = end
        return numbers


def _grown(array: np.ndarray, size: int) -> np.ndarray:
    return np.concatenate((array, np.zeros(max(len(array), size - len(array)), array.dtype)))
