"""Cut batches from token files: the batch of a step is a pure function of (seed, step).

No state is kept between steps. A resumed run, or a run on another number of ranks, takes its rows from the same
global batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

Batch = tuple[torch.Tensor, torch.Tensor]


class Tokens(Protocol):
    """Token ids, one-dimensional: an integer array, or what is read like one, such as several memory-mapped files."""

    @property
    def dtype(self) -> np.dtype: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


class BatchSource(Protocol):
    """Interface to the training loop: the rows of one rank for one step."""

    def batch(self, step: int) -> Batch:
        """Return (inputs, targets), each int64 (accumulation, rows, context_length)."""
        ...


@dataclass(kw_only=True, eq=False)
class Sampler:
    """An endless stream of rows. A step takes the next `batch_size` rows, and a rank its part of them.

    Rank r takes the r-th of `world_size` contiguous parts, cut into `accumulation` contiguous slices. The union over
    ranks and slices is the same for every split.
    """

    batch_size: int
    context_length: int
    seed: int
    rank: int = 0
    world_size: int = 1
    accumulation: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not among {self.world_size} ranks")
        if self.batch_size < 1 or self.accumulation < 1:
            raise ValueError(
                f"batch_size {self.batch_size} and accumulation {self.accumulation} must be at least 1"
            )
        if self.batch_size % (self.world_size * self.accumulation):
            raise ValueError(
                f"batch_size {self.batch_size} is not divisible by {self.world_size} ranks x "
                f"{self.accumulation} accumulation steps"
            )

    def batch(self, step: int) -> Batch:
        """Return this rank's (inputs, targets) of `step`, counted from 0; each int64 (accumulation, rows,
        context_length)."""
        count = self.batch_size // self.world_size
        first = step * self.batch_size + self.rank * count
        shape = (self.accumulation, count // self.accumulation, self.context_length)
        inputs, targets = self.rows(np.arange(first, first + count))
        return inputs.reshape(shape), targets.reshape(shape)

    def rows(self, numbers: np.ndarray) -> Batch:
        """Return (inputs, targets) of these rows of the stream, counted from 0; each int64 (rows, context_length)."""
        raise NotImplementedError

    def _random(self, numbers: np.ndarray, width: int = 1) -> np.ndarray:
        """Return `width` random uint64 for each of these rows: those of row n come from (seed, n // batch_size)."""
        steps, places = np.divmod(numbers, self.batch_size)
        raw = np.empty((len(numbers), width), np.uint64)
        for step in np.unique(steps).tolist():
            # numpy promises that the streams of Philox and SeedSequence never change; the methods of `Generator` may.
            stream = np.random.Philox(np.random.SeedSequence([self.seed, step]))
            here = steps == step
            raw[here] = stream.random_raw(self.batch_size * width).reshape(-1, width)[places[here]]
        return raw


@dataclass(kw_only=True, eq=False)
class FileSampler(Sampler):
    """Cut windows out of a token file. Subclasses say where the windows start.

    Args:
        tokens: usually memory-mapped: only sampled windows are read. A list, or a tensor on the CPU, will do.
        mask: one bit per token (`np.packbits`), whether it counts as a target; targets that do not are -1.
        borders: positions at which documents begin, for a model with `separate_documents`. The input before a border
            predicts the document's first token, and is given as its complement, ~id. None: no input is.

    Raises:
        ValueError: there are fewer than `context_length + 1` tokens; they are not integers in one dimension, or (when
            a batch is cut) negative; ranks x accumulation does not divide the batch.
    """

    tokens: Tokens = field(kw_only=False)
    mask: np.ndarray | None = None
    borders: np.ndarray | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tokens = integers("tokens", self.tokens)
        check_length(self.tokens, self.context_length)

    def rows(self, numbers: np.ndarray) -> Batch:
        starts, ends = self.starts(numbers), self.context_length + 1
        windows = np.stack([marked(self.tokens, self.mask, i, i + ends) for i in starts])
        return batch_of(windows[:, :-1], windows[:, 1:], starts, self.borders)

    def starts(self, numbers: np.ndarray) -> list[int]:
        """Return the positions of the first tokens of these rows."""
        raise NotImplementedError


@dataclass(kw_only=True, eq=False)
class TokenBatches(FileSampler):
    """Sample windows from a token file.

        >>> batches = TokenBatches(np.arange(1000), batch_size=4, context_length=8, seed=0)
        >>> inputs, targets = batches.batch(step=0)
        >>> inputs.shape
        torch.Size([1, 4, 8])
        >>> bool((targets == inputs + 1).all())
        True

    The global batch of a step is `batch_size` windows of `context_length + 1` tokens. Their starts are drawn
    uniformly, with replacement, from the whole file or from `document_starts`.

    Args:
        tokens, mask, borders: as of `FileSampler`, also what it raises.
        batch_size: windows in the global batch of one optimizer step.
        context_length: tokens that the model sees; a target is the token that follows.
        seed: decides the batches, together with the step.
        rank, world_size, accumulation: the slices of the global batch to return.
        document_starts: positions at which a window may start; None allows every position.
    """

    document_starts: np.ndarray | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.document_starts is not None:
            self.document_starts = integers("document_starts", self.document_starts)
            # A window must not reach beyond the end of the file.
            last = len(self.tokens) - self.context_length - 1
            if len(self.document_starts) and self.document_starts.min() < 0:
                raise ValueError(f"a document starts at {self.document_starts.min()}")
            self.document_starts = self.document_starts[self.document_starts <= last]
            if len(self.document_starts) == 0:
                raise ValueError(f"no document is followed by {self.context_length + 1} tokens")

    def starts(self, numbers: np.ndarray) -> list[int]:
        # The remainder of 64 bits modulo n is biased by n / 2**64, which is negligible.
        raw, places = self._random(numbers)[:, 0], self.document_starts
        if places is None:
            return (raw % np.uint64(len(self.tokens) - self.context_length)).tolist()
        return places[raw % np.uint64(len(places))].tolist()


@dataclass(kw_only=True, eq=False)
class RandomTokens(Sampler):
    """Draw uniformly random token ids, with the interface of `TokenBatches`, for benchmarks without a corpus."""

    vocab_size: int = field(kw_only=False)

    def rows(self, numbers: np.ndarray) -> Batch:
        raw = self._random(numbers, self.context_length + 1)
        windows = torch.from_numpy((raw % np.uint64(self.vocab_size)).astype(np.int64))
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def evaluation_windows(
    tokens: Tokens,
    context_length: int,
    batch_size: int,
    max_batches: int | None = None,
    *,
    mask: np.ndarray | None = None,
    borders: np.ndarray | None = None,
) -> Iterator[Batch]:
    """Yield (inputs, targets), each int64 (rows, context_length), that cover the file once, in order.

    Windows do not overlap, and every token but the first is a target exactly once. The last batch of whole
    windows may have fewer rows, and the rest of the file comes as one shorter row: weight losses by the number of
    targets. `max_batches` limits the number of batches. `mask` and `borders` are as of `FileSampler`.

    Raises:
        ValueError: there are fewer than `context_length + 1` tokens, or they are not integers in one dimension.
    """
    tokens = integers("tokens", tokens)
    check_length(tokens, context_length)
    end = len(tokens) - 1
    whole = end // context_length * context_length
    starts = [*range(0, whole, batch_size * context_length), *([whole] if whole < end else [])]
    for start in starts[:max_batches]:
        length = context_length if start < whole else end - whole
        last = min(start + batch_size * context_length, whole) if start < whole else end
        span = marked(tokens, mask, start, last + 1)
        before, after = span[:-1].reshape(-1, length), span[1:].reshape(-1, length)
        yield batch_of(before, after, range(start, last, length), borders)


def integers(name: str, values: Any) -> Any:
    """Return a list or a tensor on the CPU as an array; what is `Tokens` stays as it is."""
    array = values if isinstance(getattr(values, "dtype", None), np.dtype) else np.asanyarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        found = f"{array.dtype} {array.shape}"
        raise ValueError(f"{name} must be integers in one dimension, such as rows.reshape(-1); got {found}")
    return array


def check_length(tokens: Tokens, context_length: int) -> None:
    """Raise ValueError if there are fewer than `context_length + 1` tokens: one window and its targets."""
    if len(tokens) < context_length + 1:
        raise ValueError(f"{len(tokens)} tokens, but context_length + 1 = {context_length + 1}")


def marked(tokens: Tokens, mask: np.ndarray | None, start: int, end: int) -> np.ndarray:
    """Return tokens as int64; a token that does not count as a target as its complement, which is negative."""
    ids = tokens[start:end].astype(np.int64)
    if tokens.dtype.kind == "i" and ids.min() < 0:
        raise ValueError(f"tokens must not be negative, got {ids.min()}; say with mask= what is no target")
    if mask is None:
        return ids
    bits = np.unpackbits(mask[start // 8 : -(-end // 8)])[start % 8 :][: len(ids)]
    return np.where(bits, ids, ~ids)


def batch_of(
    inputs: np.ndarray, targets: np.ndarray, starts: Sequence[int], borders: np.ndarray | None
) -> Batch:
    """Return inputs and targets as tensors, with the input before each border marked by its complement.

    Args:
        inputs, targets: (rows, length), as `marked` returns them.
        starts: the position of the first input of each row.
        borders: positions at which documents begin, ascending.
    """
    # Undo `marked`, which says what counts as a target. From here on, a negative input means that a document begins
    # after it.
    inputs = np.maximum(inputs, ~inputs)
    if borders is not None:
        borders = np.asarray(borders)
        for row, start in zip(inputs, starts, strict=True):
            # With numbers of another type, the search would convert all borders first.
            ends = np.array((start + 1, start + len(row) + 1), borders.dtype)
            low, high = np.searchsorted(borders, ends)
            before = borders[low:high].astype(np.int64) - 1 - start
            row[before] = ~row[before]
    return torch.from_numpy(inputs), torch.from_numpy(np.maximum(targets, -1))
