"""Shuffle windows: an epoch has every token once as a target, but for fewer than 2 T at the ends of the file.

An epoch cuts the file into consecutive windows of T tokens, the context length, from a random token on; they come in
random order. Epochs follow one another without a gap: row g of a run is window g of an endless stream. Nothing is
kept between steps.

Windows that are drawn with replacement leave out e^-n of the tokens in n epochs, and repeat others too often: a model
that sees a small text three times overfits sooner.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from lmkit.core.batches import Batch, FileSampler


@dataclass(kw_only=True, eq=False)
class ShuffledBatches(FileSampler):
    """Batches of shuffled windows.

        >>> batches = ShuffledBatches(np.arange(1000), batch_size=4, context_length=8, seed=0)
        >>> starts = sorted(batches.start(row) for row in range(batches.per_epoch))
        >>> set(np.diff(starts).tolist())
        {8}

    Arguments and errors are those of `FileSampler`.

    Attributes:
        per_epoch: windows of an epoch.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        # As many windows as fit after each of the first T tokens; the windows of an epoch may thus end anywhere.
        self.per_epoch = max(1, len(self.tokens) // self.context_length - 1)
        self._order = lru_cache(maxsize=2)(self._drawn)  # of one object, not of the class: orders are large

    def batch(self, step: int) -> Batch:
        """Return this rank's (inputs, targets) of `step`, each int64 (accumulation, rows, context_length)."""
        count = self.batch_size // self.world_size
        first = step * self.batch_size + self.rank * count
        return self._cut([self.start(row) for row in range(first, first + count)])

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
