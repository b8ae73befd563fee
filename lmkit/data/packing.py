"""Pack documents into rows without waste: an epoch has every token once as a target, and no padding.

A document begins with the token before it in the file as an input, usually the end-of-text token of another one; the
end-of-text token that follows it is its last target. So n tokens take n places. Documents are drawn without
replacement, shuffled anew in every epoch, and epochs follow one another without a gap: row g of a run is places g T
to (g + 1) T of an endless stream, with T the context length. Nothing is kept between steps.

A stream is made in blocks of `BLOCK` documents. The rows of a block are filled best fit: by one document or two that
fit exactly, or else by the longest that fits. Where none fits, a document is cut, and what is left of it begins the
next row. The first input of every document, and of every part of one, is given as its complement, by which the model
tells documents apart (`model.separate_documents`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from lmkit.core.batches import Batch, FileSampler, Sampler, Tokens, marked

BLOCK = 2048
"""Documents that are packed together: enough to find exact fits, few enough to be packed in between steps."""
_ORDER, _ROWS = 1, 2  # streams of random numbers


class Piece(NamedTuple):
    """Tokens `start` to `end` of the file, as targets; the token before each is its input."""

    start: int
    end: int


@dataclass(kw_only=True, eq=False)
class PackedBatches(Sampler):
    """Batches of packed documents.

    Args:
        tokens: as of `TokenBatches`. The last one also stands before a document that begins at position 0.
        document_starts: positions at which documents begin; tokens before the first are no targets, and the last
            document ends with the file.
        mask: of a `TokenFile`: targets that do not count are -1.
    """

    tokens: Tokens = field(kw_only=False)
    document_starts: np.ndarray
    mask: np.ndarray | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        starts = self.document_starts[self.document_starts < len(self.tokens)]
        self._bounds = np.append(starts, len(self.tokens)).astype(np.int64)
        self._lengths = np.diff(self._bounds)
        self._size = int(self._lengths.sum())
        # Caches of this object, not of the class: blocks and epochs are large.
        self._order = lru_cache(maxsize=2)(self._drawn)
        self._rows_of = lru_cache(maxsize=3)(self._packed)

    @property
    def seen_context(self) -> float:
        """The context length with as many visible tokens on average: a token sees only its own document."""
        context = self.context_length
        whole, rest = np.divmod(self._lengths, context)
        return float((whole * context**2 + rest**2).sum() / self._size)

    def rows(self, numbers: np.ndarray) -> Batch:
        spans = [self._span(piece) for row in numbers.tolist() for piece in self.pieces(row)]
        tokens, ends = np.concatenate(spans), np.cumsum([len(span) for span in spans])
        begins = np.append(0, ends[:-1])
        inputs, targets = np.delete(tokens, ends - 1), np.delete(tokens, begins)
        inputs = np.maximum(inputs, ~inputs)
        firsts = begins - np.arange(len(spans))  # every span has lost its last token
        inputs[firsts] = ~inputs[firsts]
        shape = len(numbers), self.context_length
        targets = np.maximum(targets, -1).reshape(shape)
        return torch.from_numpy(inputs.reshape(shape)), torch.from_numpy(targets)

    def _span(self, piece: Piece) -> np.ndarray:
        """Return the tokens of a piece as of `marked`, with the token before it."""
        tokens = marked(self.tokens, self.mask, max(piece.start - 1, 0), piece.end)
        return tokens if piece.start else np.insert(tokens, 0, int(self.tokens[-1]))

    def pieces(self, row: int) -> list[Piece]:
        """Return the documents, and parts of them, of a row of the stream."""
        place, found = row * self.context_length, []
        end = place + self.context_length
        while place < end:
            epoch, within = divmod(place, self._size)
            _, begins = self._order(epoch)
            block = bisect_right(begins, within) - 1
            start = epoch * self._size + begins[block]
            number = place // self.context_length - start // self.context_length
            more = self._rows_of(epoch, block)[number]
            found += more
            place += sum(piece.end - piece.start for piece in more)
        return found

    def _drawn(self, epoch: int) -> tuple[np.ndarray, list[int]]:
        """Return the documents in the order of an epoch, and the places where its blocks begin, then its end."""
        numbers = self._numbers(epoch, _ORDER, len(self._lengths))
        order = np.argsort(numbers, kind="stable")
        ends = np.cumsum(self._lengths[order])
        return order, [0, *ends[BLOCK - 1 : -1 : BLOCK].tolist(), int(ends[-1])]

    def _packed(self, epoch: int, block: int) -> list[list[Piece]]:
        """Return the rows of a block; the first and the last may be parts of rows."""
        order, begins = self._order(epoch)
        context = self.context_length
        start = epoch * self._size + begins[block]
        end = epoch * self._size + begins[block + 1]
        cuts = [start, *range((start // context + 1) * context, end, context), end]
        documents = order[block * BLOCK : (block + 1) * BLOCK]
        bounds = zip(self._bounds[documents].tolist(), self._bounds[documents + 1].tolist(), strict=True)
        rows = pack([Piece(*each) for each in bounds], [int(size) for size in np.diff(cuts)])
        # The longest documents came first: shuffle all rows but the parts of rows at both ends.
        middle = rows[1:-1]
        shuffled = np.argsort(self._numbers(epoch, _ROWS + block, len(middle)), kind="stable")
        return [rows[0], *(middle[i] for i in shuffled), *rows[1:][-1:]]

    def _numbers(self, epoch: int, stream: int, count: int) -> np.ndarray:
        return np.random.Philox(np.random.SeedSequence([self.seed, epoch, stream])).random_raw(count)


def pack(documents: list[Piece], sizes: list[int]) -> list[list[Piece]]:
    """Fill rows of these sizes with documents whose tokens are as many as all rows have places.

    >>> pack([Piece(0, 5), Piece(5, 8), Piece(8, 10), Piece(10, 14)], [7, 7])
    [[Piece(start=0, end=5), Piece(start=8, end=10)], [Piece(start=10, end=14), Piece(start=5, end=8)]]
    """
    shelf = _Shelf(documents, longest=max(sizes))
    rows, rest = [], None
    for size in sizes:
        row, free = [], size
        while free:
            piece, rest = rest or shelf.take(free, begins=free == size), None
            if piece.end > (cut := piece.start + free):
                piece, rest = Piece(piece.start, cut), Piece(cut, piece.end)
            row.append(piece)
            free -= piece.end - piece.start
        rows.append(row)
    return rows


class _Shelf:
    """Documents by length, to be taken one by one.

    Bit n of `_there` says whether there is one of n tokens, up to the longest row; so does bit longest - n of
    `_backwards`. Shifted over each other, they show all pairs that fill a gap at once.
    """

    def __init__(self, documents: list[Piece], longest: int) -> None:
        self._longest = longest
        self._there = self._backwards = 0
        self._by_length: dict[int, list[Piece]] = defaultdict(list)
        self._beyond: list[Piece] = []  # longer than a row
        for piece in documents:
            length = piece.end - piece.start
            if length > longest:
                self._beyond.append(piece)
            elif length:
                self._by_length[length].append(piece)
        self._beyond.sort(key=lambda piece: piece.end - piece.start)
        for length in self._by_length:
            self._flip(length)

    def _flip(self, length: int) -> None:
        self._there ^= 1 << length
        self._backwards ^= 1 << (self._longest - length)

    def take(self, free: int, *, begins: bool) -> Piece:
        """Take a document that fills `free` places, alone or with another; else the longest that fits; else one to
        cut. `begins`: these places are a whole row."""
        fitting = self._there & ((2 << free) - 1)
        if self._beyond and (begins or not fitting):
            return self._beyond.pop()
        length = (fitting or self._there).bit_length() - 1
        if fitting and length < free:
            pairs = fitting & (self._backwards >> (self._longest - free))
            if free % 2 == 0 and len(self._by_length.get(free // 2, ())) == 1:
                pairs &= ~(1 << free // 2)
            length = (pairs or fitting).bit_length() - 1
        taken = self._by_length[length].pop()
        if not self._by_length[length]:
            del self._by_length[length]
            self._flip(length)
        return taken


@dataclass(kw_only=True, eq=False)
class ShuffledBatches(FileSampler):
    """Batches of shuffled windows: an epoch has every token once as a target, but for fewer than 2 T at both ends.

    An epoch cuts the file into consecutive windows of T tokens, the context length, from a random token on; they come
    in random order. Epochs follow one another without a gap. Windows that are drawn with replacement leave out e^-n
    of the tokens in n epochs. Arguments and errors are those of `FileSampler`; `per_epoch`: windows of an epoch.

        >>> batches = ShuffledBatches(np.arange(1000), batch_size=4, context_length=8, seed=0)
        >>> starts = sorted(batches.start(row) for row in range(batches.per_epoch))
        >>> set(np.diff(starts).tolist())
        {8}
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        # As many windows as fit after each of the first T tokens; the windows of an epoch may thus end anywhere.
        self.per_epoch = max(1, len(self.tokens) // self.context_length - 1)
        self._order = lru_cache(maxsize=2)(self._drawn)  # of one object, not of the class: orders are large

    def starts(self, numbers: np.ndarray) -> list[int]:
        return [self.start(row) for row in numbers.tolist()]

    def start(self, row: int) -> int:
        """Return the position of the first token of a row of the stream."""
        epoch, within = divmod(row, self.per_epoch)
        before, order = self._order(epoch)
        return before + int(order[within]) * self.context_length

    def _drawn(self, epoch: int) -> tuple[int, np.ndarray]:
        """Return the tokens before the first window of an epoch, and the order of its windows."""
        numbers = np.random.Philox(np.random.SeedSequence([self.seed, epoch])).random_raw(self.per_epoch + 1)
        # The last window of an epoch, too, is followed by a target.
        shifts = len(self.tokens) - self.per_epoch * self.context_length
        return int(numbers[0] % np.uint64(shifts)), np.argsort(numbers[1:], kind="stable")
