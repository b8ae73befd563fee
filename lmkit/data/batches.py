"""Token file -> batches: the batch of a step is a pure function of (seed, step).

Nothing is remembered between steps, so the position in the data is the step number itself: a resumed run, or
a run on another number of ranks, takes its rows from the same global batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch

from lmkit.errors import UsageError

Batch = tuple[torch.Tensor, torch.Tensor]


class BatchSource(Protocol):
    """What the training loop needs: the rows of one rank for one step."""

    def batch(self, step: int) -> Batch:
        """Return (inputs, targets), each int64 (accumulation, rows, context_length)."""
        ...


class TokenBatches:
    """Windows sampled from a token file.

    The global batch of a step is `batch_size` windows of `context_length + 1` tokens whose starts are drawn
    uniformly, with replacement, over the whole file, or over `document_starts`. Rank r takes the r-th of
    `world_size` contiguous parts of it, cut into `accumulation` contiguous slices: the union over ranks and
    slices is the same batch for every way of splitting it.

    Args:
        tokens: one-dimensional uint16 or uint32 array, usually memory-mapped: only sampled windows are read.
        batch_size: windows in the global batch of one optimizer step.
        context_length: tokens a model sees; a target is the token that follows.
        seed: with the step it decides the batch.
        rank, world_size, accumulation: which slices of the global batch to return.
        document_starts: positions at which a window may start; left out, every position may.

    Raises:
        UsageError: the file holds fewer than `context_length + 1` tokens, or ranks x accumulation does not
            divide the batch.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        *,
        batch_size: int,
        context_length: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        accumulation: int = 1,
        document_starts: np.ndarray | None = None,
    ) -> None:
        check_length(tokens, context_length)
        self._tokens = tokens
        self._context_length = context_length
        self._seed = seed
        self._batch_size = batch_size
        self._accumulation = accumulation
        self._rows = _rank_rows(batch_size, rank, world_size, accumulation)
        self._starts: np.ndarray | None = None
        if document_starts is not None:
            # A document too near the end of the file has no whole window behind it.
            self._starts = document_starts[document_starts < len(tokens) - context_length]
            if len(self._starts) == 0:
                raise UsageError(
                    f"{_name(tokens)}: no document is followed by {context_length + 1} tokens",
                    hint="lower model.context_length or sample raw windows",
                )

    def batch(self, step: int) -> Batch:
        """Return this rank's (inputs, targets) of `step`, each int64 (accumulation, rows, context_length)."""
        raw = _random_words(self._seed, step, self._batch_size)[self._rows]
        if self._starts is None:
            starts = raw % np.uint64(len(self._tokens) - self._context_length)
        else:
            starts = self._starts[raw % np.uint64(len(self._starts))]
        length = self._context_length + 1
        windows = np.stack([self._tokens[start : start + length] for start in starts.astype(np.int64)])
        return _inputs_and_targets(windows.reshape(self._accumulation, -1, length))


class RandomTokens:
    """Uniformly random token ids with the interface of `TokenBatches`: benchmarks then need no corpus."""

    def __init__(
        self,
        vocab_size: int,
        *,
        batch_size: int,
        context_length: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        accumulation: int = 1,
    ) -> None:
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._seed = seed
        self._batch_size = batch_size
        self._accumulation = accumulation
        self._rows = _rank_rows(batch_size, rank, world_size, accumulation)

    def batch(self, step: int) -> Batch:
        """Return this rank's (inputs, targets) of `step`, each int64 (accumulation, rows, context_length)."""
        length = self._context_length + 1
        raw = _random_words(self._seed, step, self._batch_size * length).reshape(self._batch_size, length)
        ids = raw[self._rows] % np.uint64(self._vocab_size)
        return _inputs_and_targets(ids.reshape(self._accumulation, -1, length))


def evaluation_windows(
    tokens: np.ndarray, context_length: int, batch_size: int, max_batches: int | None = None
) -> Iterator[Batch]:
    """Yield (inputs, targets), each int64 (rows, context_length), that cover the file once, in order.

    Windows do not overlap, and every token but the first is a target exactly once. The last full batch may
    have fewer rows, and what is left of the file comes as one shorter row: weight losses by the number of
    targets. With `max_batches`, only that many batches from the start of the file.

    Raises:
        UsageError: the file holds fewer than `context_length + 1` tokens.
    """
    check_length(tokens, context_length)
    return _consecutive_windows(tokens, context_length, batch_size, max_batches)


def _consecutive_windows(
    tokens: np.ndarray, context_length: int, batch_size: int, max_batches: int | None
) -> Iterator[Batch]:
    num_targets = len(tokens) - 1
    num_windows = num_targets // context_length
    batches = 0
    for first in range(0, num_windows, batch_size):
        if batches == max_batches:
            return
        last = min(first + batch_size, num_windows)
        span = tokens[first * context_length : last * context_length + 1]
        inputs = span[:-1].astype(np.int64).reshape(-1, context_length)
        targets = span[1:].astype(np.int64).reshape(-1, context_length)
        yield torch.from_numpy(inputs), torch.from_numpy(targets)
        batches += 1
    rest = tokens[num_windows * context_length :]
    if len(rest) > 1 and batches != max_batches:
        yield _inputs_and_targets(np.asarray(rest)[None])


def _random_words(seed: int, step: int, count: int) -> np.ndarray:
    """Return `count` uniform uint64 for (seed, step).

    Philox and SeedSequence are the parts of numpy whose streams are promised never to change; the methods of
    `Generator` are not. Reducing 64 bits by a modulus n is biased by n / 2**64, which nobody can measure.
    """
    return np.random.Philox(np.random.SeedSequence([seed, step])).random_raw(count)


def _inputs_and_targets(windows: np.ndarray) -> Batch:
    ids = windows.astype(np.int64)  # (..., context + 1)
    inputs = torch.from_numpy(np.ascontiguousarray(ids[..., :-1]))
    targets = torch.from_numpy(np.ascontiguousarray(ids[..., 1:]))
    return inputs, targets


def _rank_rows(batch_size: int, rank: int, world_size: int, accumulation: int) -> slice:
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not among {world_size} ranks")
    if batch_size < 1 or accumulation < 1:
        raise ValueError(f"batch_size {batch_size} and accumulation {accumulation} must be at least 1")
    if batch_size % (world_size * accumulation):
        raise UsageError(
            f"train.batch_size = {batch_size} is not divisible by "
            f"{world_size} ranks x {accumulation} accumulation steps",
            hint=f"use a multiple of {world_size * accumulation}",
        )
    rows = batch_size // world_size
    return slice(rank * rows, (rank + 1) * rows)


def check_length(tokens: np.ndarray, context_length: int) -> None:
    """Refuse token ids of which not even one window and its targets can be cut.

    Raises:
        UsageError: there are fewer than `context_length + 1`; names the file.
    """
    if len(tokens) < context_length + 1:
        raise UsageError(
            f"{_name(tokens)}: {len(tokens)} tokens, but model.context_length + 1 = {context_length + 1}",
            hint="use a longer text or a shorter model.context_length",
        )


def _name(tokens: np.ndarray) -> str:
    filename = tokens.filename if isinstance(tokens, np.memmap) else None
    return "token file" if filename is None else str(filename)
