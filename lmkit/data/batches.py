"""Cut batches from token files: the batch of a step is a pure function of (seed, step).

No state is kept between steps. A resumed run, or a run on another number of ranks, takes its rows from the same
global batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch

from lmkit.errors import UsageError

Batch = tuple[torch.Tensor, torch.Tensor]


class BatchSource(Protocol):
    """Interface to the training loop: the rows of one rank for one step."""

    def batch(self, step: int) -> Batch:
        """Return (inputs, targets), each int64 (accumulation, rows, context_length)."""
        ...


class TokenBatches:
    """Sample windows from a token file.

        >>> batches = TokenBatches(np.arange(1000), batch_size=4, context_length=8, seed=0)
        >>> inputs, targets = batches.batch(step=0)
        >>> inputs.shape
        torch.Size([1, 4, 8])
        >>> bool((targets == inputs + 1).all())
        True

    The global batch of a step is `batch_size` windows of `context_length + 1` tokens. Their starts are drawn
    uniformly, with replacement, from the whole file or from `document_starts`. Rank r takes the r-th of `world_size`
    contiguous parts of the batch, cut into `accumulation` contiguous slices. The union over ranks and slices is the
    same for every split.

    Args:
        tokens: one-dimensional uint16 or uint32 array, usually memory-mapped: only sampled windows are read.
        batch_size: windows in the global batch of one optimizer step.
        context_length: tokens that the model sees; a target is the token that follows.
        seed: decides the batches, together with the step.
        rank, world_size, accumulation: the slices of the global batch to return.
        document_starts: positions at which a window may start; None allows every position.

    Raises:
        UsageError: the file holds fewer than `context_length + 1` tokens ("tokens.too_short"), or ranks x
            accumulation does not divide the batch ("batches.indivisible").
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
            # A window must not reach beyond the end of the file.
            self._starts = document_starts[document_starts < len(tokens) - context_length]
            if len(self._starts) == 0:
                raise UsageError(
                    "tokens.too_short",
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
    """Draw uniformly random token ids, with the interface of `TokenBatches`, for benchmarks without a corpus."""

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

    Windows do not overlap, and every token but the first is a target exactly once. The last full batch may have
    fewer rows, and the rest of the file comes as one shorter row: weight losses by the number of targets.
    `max_batches` limits the number of batches.

    Raises:
        UsageError: the file holds fewer than `context_length + 1` tokens ("tokens.too_short").
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

    numpy promises that the streams of Philox and SeedSequence never change; the methods of `Generator` may. The
    remainder of 64 bits modulo n is biased by n / 2**64, which is negligible.
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
            "batches.indivisible",
            f"train.batch_size = {batch_size} is not divisible by "
            f"{world_size} ranks x {accumulation} accumulation steps",
            hint=f"use a multiple of {world_size * accumulation}",
        )
    rows = batch_size // world_size
    return slice(rank * rows, (rank + 1) * rows)


def check_length(tokens: np.ndarray, context_length: int) -> None:
    """Refuse token ids that are too few for one window and its targets.

    Raises:
        UsageError: there are fewer than `context_length + 1` ids ("tokens.too_short"); names the file.
    """
    if len(tokens) < context_length + 1:
        raise UsageError(
            "tokens.too_short",
            f"{_name(tokens)}: {len(tokens)} tokens, but model.context_length + 1 = {context_length + 1}",
            hint="use a longer text or a shorter model.context_length",
        )


def _name(tokens: np.ndarray) -> str:
    filename = tokens.filename if isinstance(tokens, np.memmap) else None
    return "token file" if filename is None else str(filename)
