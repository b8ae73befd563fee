"""Mix the rows of several streams in fixed shares, without any state.

Rows come in blocks of `BLOCK`. A source's rows before block b are its share of all rows before b, rounded; the
heaviest source has the rest. Within a block their order is random, and every source's own rows keep theirs: row g of
the mixture is the next row of a source, whose number follows from g alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
import torch

from lmkit.core.batches import Batch, Sampler

BLOCK = 1024
"""The heaviest of 32 sources has a row in every block of this size."""


@dataclass(kw_only=True, eq=False)
class MixedBatches(Sampler):
    """Batches of rows of several samplers.

        >>> from lmkit.core.batches import TokenBatches
        >>> sizes = {"batch_size": 4, "context_length": 8, "seed": 0}
        >>> sources = [TokenBatches(np.full(100, token), **sizes) for token in (1, 2)]
        >>> mixed = MixedBatches(sources=sources, weights=[3, 1], **sizes)
        >>> inputs, targets = mixed.rows(np.arange(BLOCK))
        >>> int((inputs[:, 0] == 1).sum())
        768

    Args:
        sources: at most 32, with the same context length, batch size and seed.
        weights: positive numbers; a source's share of the rows is its weight over their sum.
    """

    sources: Sequence[Sampler]
    weights: Sequence[float]

    def __post_init__(self) -> None:
        super().__post_init__()
        weights = list(map(Fraction, self.weights))  # exact, so that no row depends on how a float is rounded
        self.shares = [weight / sum(weights) for weight in weights]
        self._heaviest = self.shares.index(max(self.shares))
        self._block = lru_cache(maxsize=4)(self._drawn)  # of one object, not of the class

    @property
    def seen_context(self) -> float:
        """The context length with as many visible tokens on average."""
        seen = [getattr(source, "seen_context", self.context_length) for source in self.sources]
        return float(sum(share * Fraction(value) for share, value in zip(self.shares, seen, strict=True)))

    def rows(self, numbers: np.ndarray) -> Batch:
        owners, numbers = self.places(numbers)
        inputs = torch.empty(len(numbers), self.context_length, dtype=torch.int64)
        targets = torch.empty_like(inputs)
        for owner in np.unique(owners).tolist():
            here = np.flatnonzero(owners == owner)
            inputs[here], targets[here] = self.sources[owner].rows(numbers[here])
        return inputs, targets

    def places(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the index of the source of these rows, and the rows' numbers in their sources."""
        blocks, within = np.divmod(numbers, BLOCK)
        found = np.empty((2, len(numbers)), np.int64)
        for block in np.unique(blocks).tolist():
            here = blocks == block
            found[:, here] = self._block(block)[:, within[here]]
        return found[0], found[1]

    def rows_before(self, block: int) -> np.ndarray:
        """Return how many rows of each source come before a block."""
        total = block * BLOCK
        counts = [math.floor(share * total + Fraction(1, 2)) for share in self.shares]
        counts[self._heaviest] += total - sum(counts)
        return np.array(counts)

    def _drawn(self, block: int) -> np.ndarray:
        """Return the sources of the rows of a block, and the rows' numbers in their sources, (2, BLOCK)."""
        before, after = self.rows_before(block), self.rows_before(block + 1)
        counts = after - before
        # SeedSequence takes missing numbers for zeros: the 1 tells this stream from those of the sources.
        numbers = np.random.Philox(np.random.SeedSequence([self.seed, block, 0, 1])).random_raw(BLOCK)
        owners = np.repeat(np.arange(len(counts)), counts)[np.argsort(numbers, kind="stable")]
        own = np.empty(BLOCK, np.int64)
        for source, (first, end) in enumerate(zip(before, after, strict=True)):
            own[owners == source] = np.arange(first, end)
        return np.stack((owners, own))
