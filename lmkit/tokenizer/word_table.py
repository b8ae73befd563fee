"""Numbers for words: the same word gets the same number, 0, 1, 2... in order of first appearance.

A dict does that at some 60 ns a word. Here a whole chunk of words is looked up at once. A word of up to 7 bytes (7 of
8 words) is one integer, its bytes padded with zeros and its length in the topmost byte, and those are compared
exactly, in an open-addressing table of numpy arrays. Words of up to 15 bytes take two integers, of up to 31 four,
and the few that are longer a dict.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

_INTEGER = 8  # bytes
_LENGTH_SHIFT = np.uint64(8 * (_INTEGER - 1))
_MASKS = np.array([(1 << (8 * n)) - 1 for n in range(_INTEGER)] + [(1 << 64) - 1], np.uint64)  # first n bytes
_MULTIPLIERS = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], np.uint64
)


class _IntegerTable:
    """Words of fewer than 8 * width bytes, each as `width` integers."""

    def __init__(self, width: int, capacity: int) -> None:
        self.width = width
        self.longest = _INTEGER * width - 1
        self._resize(capacity)

    def _resize(self, capacity: int) -> None:
        self._capacity = capacity
        self._shift = np.uint64(64 - (capacity.bit_length() - 1))
        self._keys = [np.zeros(capacity, np.uint64) for _ in range(self.width)]
        self._numbers = np.zeros(capacity, np.int32)
        self._used = 0

    def look_up(
        self, integers: np.ndarray, starts: np.ndarray, lengths: np.ndarray, next_number: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Number the words that are short enough; those not seen before get `next_number` and up.

        Args:
            integers: of `_integers_at_every_byte`.

        Returns:
            The number of each word (anything for one that is too long), and the indices of the first of each new
            word, in order of number.
        """
        words = _as_integers(integers, starts, lengths, self.width)
        slot = self._slots(words)
        numbers = self._numbers.take(slot, mode="clip")  # nothing to clip, but faster than with a check
        # An empty slot holds zeros, which are no word: its length would be 0.
        missed = np.flatnonzero(~self._holds(slot, words))
        missed = missed[lengths[missed] <= self.longest]
        slot = slot[missed]
        new = [missed[:0]]
        while len(missed):  # walk on to the next slot until the word, or a free slot, turns up
            free = self._keys[-1][slot] == 0
            new.append(missed[free])
            missed = missed[~free]
            slot = (slot[~free] + 1) & (self._capacity - 1)
            found = self._holds(slot, [key[missed] for key in words])
            numbers[missed[found]] = self._numbers[slot[found]]
            missed, slot = missed[~found], slot[~found]
        fresh = np.sort(np.concatenate(new))
        if not len(fresh):
            return numbers, fresh
        first, which = _distinct([key[fresh] for key in words])
        numbers[fresh] = next_number + which
        first = fresh[first]
        self._insert(
            [key[first] for key in words], np.arange(next_number, next_number + len(first), dtype=np.int32)
        )
        return numbers, first

    def _slots(self, words: list[np.ndarray]) -> np.ndarray:
        # Multiply-shift hashing of a vector (Dietzfelbinger 1996): the topmost bits of the sum depend on all bits.
        total = words[0] * _MULTIPLIERS[0]
        for key, multiplier in zip(words[1:], _MULTIPLIERS[1:], strict=False):
            total += key * multiplier
        total >>= self._shift
        return total.view(np.int64)

    def _holds(self, slot: np.ndarray, words: list[np.ndarray]) -> np.ndarray:
        equal = self._keys[0].take(slot, mode="clip") == words[0]
        for key, word in zip(self._keys[1:], words[1:], strict=True):
            equal &= key.take(slot, mode="clip") == word
        return equal

    def _insert(self, words: list[np.ndarray], numbers: np.ndarray) -> None:
        """Insert distinct words that are not in the table."""
        if 2 * (self._used + len(numbers)) > self._capacity:
            old = np.flatnonzero(self._keys[-1])
            words = [np.concatenate((key[old], word)) for key, word in zip(self._keys, words, strict=True)]
            numbers = np.concatenate((self._numbers[old], numbers))
            self._resize(1 << (4 * len(numbers) - 1).bit_length())
        self._used += len(numbers)
        slot = self._slots(words)
        waiting = np.arange(len(numbers))
        while len(waiting):
            # Of several words that want one free slot, the one written last has it; the others see that and walk on.
            want = slot[waiting]
            free = self._keys[-1][want] == 0
            candidates, want = waiting[free], want[free]
            self._numbers[want] = numbers[candidates]
            placed = candidates[self._numbers[want] == numbers[candidates]]
            for key, word in zip(self._keys, words, strict=True):
                key[slot[placed]] = word[placed]
            is_placed = np.zeros(len(numbers), np.bool_)
            is_placed[placed] = True
            waiting = waiting[~is_placed[waiting]]
            slot[waiting] = (slot[waiting] + 1) & (self._capacity - 1)


def _distinct(keys: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of the first of each distinct key, ascending, and which of these each key equals."""
    order = np.lexsort(keys)  # stable: equal keys stay in order of index
    changes = np.zeros(len(order), np.bool_)
    changes[0] = True
    for key in keys:
        changes[1:] |= key[order[1:]] != key[order[:-1]]
    first = order[changes]
    by_appearance = np.argsort(first)
    rank = np.empty(len(first), np.int64)
    rank[by_appearance] = np.arange(len(first))
    which = np.empty(len(order), np.int64)
    which[order] = rank[np.cumsum(changes) - 1]
    return first[by_appearance], which


class NewWords(NamedTuple):
    """Words that a look-up saw for the first time, in order of number."""

    text: np.ndarray  # all of them, joined; uint8
    lengths: np.ndarray  # int64


class WordTable:
    """Words of any length by number.

    Args:
        capacity: slots to begin with; twice the number of distinct words spares the table from growing.
    """

    def __init__(self, capacity: int = 1 << 17) -> None:
        self._tables = [
            _IntegerTable(1, capacity),
            _IntegerTable(2, capacity),
            _IntegerTable(4, capacity >> 3),
        ]
        self._long: dict[bytes, int] = {}
        self.num_words = 0

    def look_up(self, data: bytes, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, NewWords]:
        """Return the numbers, int32, of the words data[start : start + length], and the words that are new."""
        integers = _integers_at_every_byte(data)
        new = []
        numbers = np.zeros(0, np.int32)
        rest: np.ndarray | None = None  # the words that are too long for the tables so far; None: all of them
        for table in self._tables:
            some = slice(None) if rest is None else rest
            found, first = table.look_up(integers, starts[some], lengths[some], self.num_words)
            self.num_words += len(first)
            if rest is None:
                numbers = found
                new.append(first)
                rest = np.flatnonzero(lengths > table.longest)
            else:
                numbers[rest] = found
                new.append(rest[first])
                rest = rest[lengths[rest] > table.longest]
        assert rest is not None
        new.append(self._look_up_long(data, starts, lengths, rest, numbers))
        which = np.concatenate(new)
        text = np.frombuffer(data, np.uint8)
        return numbers, NewWords(joined(text, starts[which], lengths[which]), lengths[which])

    def _look_up_long(
        self, data: bytes, starts: np.ndarray, lengths: np.ndarray, here: np.ndarray, numbers: np.ndarray
    ) -> np.ndarray:
        new = []
        for i, start, length in zip(
            here.tolist(), starts[here].tolist(), lengths[here].tolist(), strict=True
        ):
            word = data[start : start + length]
            number = self._long.get(word)
            if number is None:
                number = self._long[word] = self.num_words
                self.num_words += 1
                new.append(i)
            numbers[i] = number
        return np.array(new, np.int64)


def joined(values: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the slices values[start : start + length], one behind the other."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return values[np.repeat(starts - (ends - lengths), lengths) + np.arange(total)]


def _integers_at_every_byte(data: bytes) -> np.ndarray:
    """Return a view whose element i is data[i : i + 8] as an integer, with zeros behind the end; uint64."""
    padded = data + bytes(4 * _INTEGER)
    return np.ndarray((len(padded) - _INTEGER + 1,), np.uint64, padded, strides=(1,))


def _as_integers(
    integers: np.ndarray, starts: np.ndarray, lengths: np.ndarray, width: int
) -> list[np.ndarray]:
    """Return the words as `width` integers each; what that is for a word that is too long does not matter."""
    keys = [integers[starts] & _MASKS.take(lengths, mode="clip")]
    for i in range(1, width):
        key = np.zeros(len(starts), np.uint64)
        reaches = np.flatnonzero(lengths > _INTEGER * i)
        mask = _MASKS.take(lengths[reaches] - _INTEGER * i, mode="clip")
        key[reaches] = integers[starts[reaches] + _INTEGER * i] & mask
        keys.append(key)
    keys[-1] |= lengths.view(np.uint64) << _LENGTH_SHIFT
    return keys
