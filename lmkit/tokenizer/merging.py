"""Learning the merges: which pair of tokens becomes the next token, thousands of times over.

The rule: merge, everywhere, the pair of neighbouring tokens with the highest count; of equal counts the greatest
(left bytes, right bytes). Then count again, and so on: twenty lines, which the tests have. Three ideas make it fast:

**Count once.** A merge changes only counts of pairs around it. All distinct words lie in one array of slots, a
separator between words; a merged pair leaves its token in the left slot, and the right slot drops out of a linked
list. For each pair we know its count and where it occurs. A pair that arises later contains the new token, so it
is never one that was known before, and the count of a known pair never rises.

**A lazy heap** gives the pairs in order of (count, bytes). As counts only fall, an entry that is out of date is seen
when it comes to the top: it goes back with its present count.

**Many merges at a time.** Array operations cost the same for one pair as for fifty. So a step takes the next pairs in
order and keeps the longest prefix that is certain to be merged in just this order one by one:

1. no occurrence of a kept pair overlaps one of another, so that merging the first does not change the count of the
   second; and
2. every pair that these merges could create stays below the count of each kept pair that is still to come. An upper
   bound of its count is enough: the weights of a pair's occurrences, summed by what stands left (or right) of them.

A pair of equal tokens may overlap itself ("aaaa"); it goes alone, and takes every other occurrence of a run.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from lmkit.errors import LmkitError
from lmkit.recipe.vocabulary import MAX_VOCABULARY, NUM_BYTES
from lmkit.tokenizer.word_counter import WordCounts

_NO_TOKEN = MAX_VOCABULARY  # in separators, and in slots that a merge has emptied
_TOKEN_BITS = 20
_SLOT_BITS = 31
_LONGEST_STEP = 128  # pairs
_WORK_PER_STEP = 3000  # occurrences; beyond, the arrays are long enough for numpy
_BUCKETS = 64  # neighbours share buckets; a shared one only raises the bound
_NOT_IN_STEP = 1 << 20


class _Candidate(NamedTuple):
    """A heap entry. heapq takes the smallest: counts are negated, and bytes inverted (`_inverted`)."""

    negative_count: int
    left: str
    right: str
    pair: int


class _Occurrences(NamedTuple):
    """Where the pairs of a step occur, grouped by pair."""

    slot: np.ndarray  # of the left token
    rank: np.ndarray  # which pair of the step, ascending


def learn_merges(
    words: WordCounts, num_merges: int, progress: Callable[[int, int], None] | None = None
) -> list[tuple[int, int]]:
    """Return up to `num_merges` merges, in order, as (left id, right id); merge i makes token 256 + i.

    Fewer are returned when every word has become a single token.

    Raises:
        LmkitError: more text in distinct words than 31 bits can address.
    """
    if num_merges <= 0 or not len(words.lengths):
        return []
    learner = _Learner(words)
    while len(learner.merges) < num_merges and learner.step(num_merges - len(learner.merges)):
        if progress is not None:
            progress(len(learner.merges), num_merges)
    return learner.merges


class _Learner:
    """Words in slots, pairs with their counts and places, and the merges so far."""

    def __init__(self, words: WordCounts) -> None:
        num_slots = len(words.text) + len(words.lengths) + 1
        if num_slots >= 1 << _SLOT_BITS:
            raise LmkitError("the distinct words of the corpus exceed 2 GiB", hint="train on less text")
        self.merges: list[tuple[int, int]] = []
        self._token_order = [_inverted(bytes([b])) for b in range(NUM_BYTES)]

        # Slots: | separator | word | separator | word | ... | separator |
        word_of_byte = np.repeat(np.arange(len(words.lengths)), words.lengths)
        self._token = np.full(num_slots, _NO_TOKEN, np.int32)
        self._token[np.arange(len(words.text)) + word_of_byte + 1] = words.text
        self._weight = np.concatenate(([0], np.repeat(words.counts, words.lengths + 1)))
        self._next = np.arange(1, num_slots + 1, dtype=np.int32)
        self._previous = np.arange(-1, num_slots - 1, dtype=np.int32)
        self._next[-1], self._previous[0] = num_slots - 1, 0
        self._pair_at = np.zeros(num_slots, np.int32)  # the pair that begins here; 0: none

        # Pairs: number -> tokens, count, and places[first[pair] : first[pair + 1]], some of them out of date.
        self._num_pairs = 1
        self._left = np.zeros(1 << 16, np.int32)
        self._right = np.zeros(1 << 16, np.int32)
        self._count = np.zeros(1 << 16, np.int64)
        self._first = np.zeros(1 << 16, np.int64)
        self._step_rank = np.full(1 << 16, _NOT_IN_STEP, np.int32)
        self._places = np.empty(2 * num_slots, np.int32)

        starts = np.flatnonzero((self._token[:-1] != _NO_TOKEN) & (self._token[1:] != _NO_TOKEN))
        left, right = self._token[starts].astype(np.int64), self._token[starts + 1]
        self._add_pairs(starts, left << _TOKEN_BITS | right, lambda group: (group >> _TOKEN_BITS, group))

        # The heap holds every pair whose count is at least `floor`; the others wait until it is empty.
        self._heap: list[_Candidate] = []
        self._floor = int(self._count.max()) + 1
        self._step_size = 1

    def step(self, limit: int) -> bool:
        """Do the next merges, at most `limit`; False when no pair is left."""
        chosen = self._next_candidates(min(self._step_size, limit))
        if not chosen:
            return False
        found = self._occurrences(chosen)
        if len(chosen) > 1:
            keep = min(self._conflict_free(chosen, found), self._certain(chosen, found))
            whole = keep == len(chosen)
            self._step_size = min(_LONGEST_STEP, 2 * len(chosen)) if whole else keep + keep // 2 + 1
            for candidate in chosen[keep:]:
                heapq.heappush(self._heap, candidate)
            chosen = chosen[:keep]
            size = int(np.searchsorted(found.rank, keep))
            found = _Occurrences(found.slot[:size], found.rank[:size])
        elif len(found.slot) < _WORK_PER_STEP:
            self._step_size = 2
        pair = chosen[0].pair
        if len(chosen) == 1 and self._left[pair] == self._right[pair]:
            found = self._every_other_of_runs(found)
        self._merge(chosen, found)
        return True

    # ---- choosing

    def _next_candidates(self, wanted: int) -> list[_Candidate]:
        """Take the next pairs off the heap, with true counts, in order."""
        chosen: list[_Candidate] = []
        work = 0
        while len(chosen) < wanted and work < _WORK_PER_STEP:
            if not self._heap:
                if chosen or not self._refill_heap():
                    break
                continue
            candidate = heapq.heappop(self._heap)
            pair = candidate.pair
            count = int(self._count[pair])
            if count == -candidate.negative_count:
                chosen.append(candidate)
                work += int(self._first[pair + 1] - self._first[pair])
            elif count >= self._floor:
                heapq.heappush(self._heap, _Candidate(-count, candidate.left, candidate.right, pair))
        return chosen

    def _refill_heap(self) -> bool:
        """Lower the floor; False if every count is zero."""
        counts = self._count[: self._num_pairs]
        top = int(counts.max())
        if top == 0:  # a pair whose last occurrence was merged away must not be merged itself
            return False
        ceiling = self._floor
        self._floor = max(1, min(ceiling, top + 1) * 5 // 8)
        waiting = np.flatnonzero((counts >= self._floor) & (counts < ceiling))
        self._heap = [self._candidate(pair) for pair in waiting.tolist()]
        heapq.heapify(self._heap)
        return True

    def _candidate(self, pair: int) -> _Candidate:
        left, right = self._token_order[self._left[pair]], self._token_order[self._right[pair]]
        return _Candidate(-int(self._count[pair]), left, right, pair)

    def _occurrences(self, chosen: list[_Candidate]) -> _Occurrences:
        pairs = np.array([candidate.pair for candidate in chosen])
        slot = np.concatenate([self._places[self._first[pair] : self._first[pair + 1]] for pair in pairs])
        rank = np.repeat(np.arange(len(pairs)), self._first[pairs + 1] - self._first[pairs])
        current = self._pair_at[slot] == pairs[rank]
        return _Occurrences(slot[current], rank[current])

    def _conflict_free(self, chosen: list[_Candidate], found: _Occurrences) -> int:
        """Return how many of the chosen pairs, at least one, overlap none before them (nor themselves)."""
        pairs = [candidate.pair for candidate in chosen]
        self._step_rank[pairs] = np.arange(len(chosen))
        before = self._step_rank[self._pair_at[self._previous[found.slot]]]
        after = self._step_rank[self._pair_at[self._next[found.slot]]]
        self._step_rank[pairs] = _NOT_IN_STEP
        # Two pairs that overlap: the later one of the two has to wait.
        first_to_wait = min(int(np.maximum(found.rank, other).min()) for other in (before, after))
        return max(1, min(len(chosen), first_to_wait))

    def _certain(self, chosen: list[_Candidate], found: _Occurrences) -> int:
        """Return how many of the chosen pairs, at least one, no newly created pair can overtake."""
        before = self._token[self._previous[found.slot]]
        after = self._token[self._next[self._next[found.slot]]]
        weight = self._weight[found.slot]
        bucket = found.rank * _BUCKETS
        num_buckets = len(chosen) * _BUCKETS
        bound = np.bincount(
            np.concatenate((bucket + (before & _BUCKETS - 1), bucket + (after & _BUCKETS - 1) + num_buckets)),
            np.concatenate((weight * (before != _NO_TOKEN), weight * (after != _NO_TOKEN))),
            2 * num_buckets,
        )  # float64: exact up to 2**53 occurrences
        most = np.maximum.accumulate(bound.reshape(2, len(chosen), _BUCKETS).max(axis=(0, 2)))
        counts = np.array([-candidate.negative_count for candidate in chosen])
        overtaken = np.flatnonzero(most[:-1] >= counts[1:])
        return int(overtaken[0]) + 1 if len(overtaken) else len(chosen)

    def _every_other_of_runs(self, found: _Occurrences) -> _Occurrences:
        """Of "aaaa" keep the first "aa" and the third, not the one in between."""
        slot = np.sort(found.slot)
        index = np.arange(len(slot))
        begins_run = np.concatenate(([True], self._next[slot[:-1]] != slot[1:]))
        run_start = np.maximum.accumulate(np.where(begins_run, index, 0))
        slot = slot[(index - run_start) % 2 == 0]
        return _Occurrences(slot, np.zeros(len(slot), np.int64))

    # ---- merging

    def _merge(self, chosen: list[_Candidate], found: _Occurrences) -> None:
        first_new = NUM_BYTES + len(self.merges)
        for candidate in chosen:
            self.merges.append((int(self._left[candidate.pair]), int(self._right[candidate.pair])))
            self._token_order.append(candidate.left[:-1] + candidate.right)
        slot, second = found.slot, self._next[found.slot]
        self._token[slot] = first_new + found.rank
        self._token[second] = _NO_TOKEN

        # The pairs that reached into the occurrences are gone: (second, what follows) and (what precedes, first).
        weight = self._weight[slot]
        before = self._previous[slot]
        alone = self._token[before] != _NO_TOKEN  # else it was the second of a merge: already counted there
        np.subtract.at(self._count, self._pair_at[second], weight)
        np.subtract.at(self._count, self._pair_at[before[alone]], weight[alone])
        self._count[[candidate.pair for candidate in chosen]] = 0
        self._count[0] = 0

        after = self._next[second]
        self._next[slot] = after
        self._previous[after] = slot
        self._pair_at[slot] = 0
        self._pair_at[second] = 0
        self._add_pairs_around(slot, found.rank, first_new)

    def _add_pairs_around(self, slot: np.ndarray, rank: np.ndarray, first_new: int) -> None:
        before, after = self._previous[slot], self._next[slot]
        left, right = self._token[before], self._token[after]
        has_right = right != _NO_TOKEN
        has_left = left < first_new  # two new tokens side by side are one pair: the left one's
        # A group is (new token, which side of the pair it is on, the other token).
        groups = np.concatenate(
            (
                (2 * rank[has_right] + 1) << _TOKEN_BITS | right[has_right],
                (2 * rank[has_left]) << _TOKEN_BITS | left[has_left],
            )
        )

        def tokens(group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            new = (group >> _TOKEN_BITS + 1) + first_new
            other = group & _NO_TOKEN
            new_is_left = group >> _TOKEN_BITS & 1
            return np.where(new_is_left, new, other), np.where(new_is_left, other, new)

        first = self._add_pairs(np.concatenate((slot[has_right], before[has_left])), groups, tokens)
        high = np.flatnonzero(self._count[first : self._num_pairs] >= self._floor) + first
        for pair in high.tolist():
            heapq.heappush(self._heap, self._candidate(pair))

    def _add_pairs(
        self,
        places: np.ndarray,
        groups: np.ndarray,
        tokens: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]],
    ) -> int:
        """Add one pair for each distinct group of places; return the number of the first.

        Args:
            places: slots at which a new pair begins.
            groups: which pair that is: any integers below 2**32, equal where the pair is.
            tokens: group -> (left, right); their lowest 20 bits count.
        """
        if not len(places):
            return self._num_pairs
        keys = groups << _SLOT_BITS | places
        keys.sort()
        groups, places = keys >> _SLOT_BITS, keys & (1 << _SLOT_BITS) - 1
        edges = np.flatnonzero(np.concatenate(([True], groups[1:] != groups[:-1])))
        first, end = self._num_pairs, self._num_pairs + len(edges)
        used = int(self._first[first])
        self._make_room(end + 1, used + len(places))
        left, right = tokens(groups[edges])
        self._left[first:end] = left & _NO_TOKEN
        self._right[first:end] = right & _NO_TOKEN
        self._count[first:end] = np.add.reduceat(self._weight[places], edges)
        self._first[first:end] = used + edges
        self._first[end] = used + len(places)
        self._places[used : used + len(places)] = places
        sizes = self._first[first + 1 : end + 1] - self._first[first:end]
        self._pair_at[places] = np.repeat(np.arange(first, end, dtype=np.int32), sizes)
        self._num_pairs = end
        return first

    def _make_room(self, num_pairs: int, num_places: int) -> None:
        if num_pairs > len(self._count):
            self._left = _grown(self._left, num_pairs)
            self._right = _grown(self._right, num_pairs)
            self._count = _grown(self._count, num_pairs)
            self._first = _grown(self._first, num_pairs)
            self._step_rank = np.full(len(self._count), _NOT_IN_STEP, np.int32)
        if num_places > len(self._places):
            self._places = _grown(self._places, num_places)


def _inverted(token: bytes) -> str:
    """Return a string that sorts in the opposite order of `token`: every byte is inverted, and the end sorts last."""
    return "".join(chr(255 - b) for b in token) + "\u0100"


def _grown(array: np.ndarray, size: int) -> np.ndarray:
    return np.concatenate((array, np.zeros(max(len(array), size - len(array)), array.dtype)))
