"""How often each distinct word occurs in a corpus: the larger half of training, spread over threads.

Threads are enough: numpy gives up the interpreter's lock inside its loops. Every thread takes the next chunk of text,
counts in a table of its own, and the tables are added up at the end; sums do not depend on who counted what.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lmkit.tokenizer.boundaries import word_starts
from lmkit.tokenizer.chunks import Chunk, ErrorMode, exact_chunks, read_blocks, valid_utf8
from lmkit.tokenizer.special_tokens import SpecialTokens
from lmkit.tokenizer.word_table import NewWords, WordTable

Progress = Callable[[str, int, int], None]
"""Called with the name of a stage, how much of it is done, and how much there is (bytes or steps)."""

_TABLE_CAPACITY = 1 << 19  # room for the 200,000 distinct words of real text before the table grows
_PENDING_WORDS = 1 << 21


@dataclass(frozen=True)
class WordCounts:
    """The distinct words of a corpus."""

    text: np.ndarray
    """All of them, joined; uint8."""
    lengths: np.ndarray
    """Bytes of each; int64."""
    counts: np.ndarray
    """Occurrences of each; int64."""
    num_special: int
    """Occurrences of special tokens, which are in no word."""


class WordCounter:
    """Counts the words of chunks of text."""

    def __init__(self, specials: SpecialTokens) -> None:
        self._specials = specials
        self._table = WordTable(_TABLE_CAPACITY)
        self._words: list[NewWords] = []
        self._counts = np.zeros(0, np.int64)
        self._pending: list[np.ndarray] = []
        self._num_pending = 0
        self._num_special = 0

    def add(self, data: bytes) -> None:
        """Count the words of `data`: valid UTF-8, not empty, cut from its neighbours as `chunks` does."""
        spans = self._specials.find(data)
        starts = word_starts(data, spans)
        lengths = np.diff(starts, append=len(data))
        if spans:
            self._num_special += len(spans)
            keep = np.ones(len(starts), np.bool_)
            keep[np.searchsorted(starts, [span.start for span in spans])] = False
            starts, lengths = starts[keep], lengths[keep]
        numbers, new = self._table.look_up(data, starts, lengths)
        self._words.append(new)
        self._pending.append(numbers)
        self._num_pending += len(numbers)
        if self._num_pending > _PENDING_WORDS:
            self._settle()

    def result(self) -> WordCounts:
        self._settle()
        return WordCounts(
            text=np.concatenate([new.text for new in self._words] or [np.zeros(0, np.uint8)]),
            lengths=np.concatenate([new.lengths for new in self._words] or [np.zeros(0, np.int64)]),
            counts=self._counts,
            num_special=self._num_special,
        )

    def absorb(self, other: WordCounts) -> None:
        """Add what another counter has found."""
        self._settle()
        self._num_special += other.num_special
        if not len(other.lengths):
            return
        ends = np.cumsum(other.lengths)
        numbers, new = self._table.look_up(other.text.tobytes(), ends - other.lengths, other.lengths)
        self._words.append(new)
        self._counts = np.concatenate((self._counts, np.zeros(len(new.lengths), np.int64)))
        self._counts[numbers] += other.counts  # the words of `other` are distinct

    def _settle(self) -> None:
        """Turn the numbers seen since the last time into counts; many at once, for a pass costs the whole table."""
        counts = np.bincount(
            np.concatenate([np.zeros(0, np.int32), *self._pending]), minlength=self._table.num_words
        )
        counts[: len(self._counts)] += self._counts
        self._counts = counts
        self._pending, self._num_pending = [], 0


@dataclass
class _SharedChunks:
    """An iterator that several threads may call; reports what has been handed out."""

    chunks: Iterator[Chunk]
    total_bytes: int
    progress: Progress | None
    done_bytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __iter__(self) -> Iterator[Chunk]:
        while (chunk := self._next()) is not None:
            yield chunk

    def _next(self) -> Chunk | None:
        with self.lock:
            chunk = next(self.chunks, None)
            if chunk is not None:
                self.done_bytes += len(chunk.data)
                if self.progress is not None:
                    self.progress("count words", self.done_bytes, self.total_bytes)
            return chunk

    def stop(self) -> None:
        """Let every thread find nothing more to do."""
        with self.lock:
            self.chunks = iter(())


def count_words(
    paths: Sequence[Path],
    *,
    specials: SpecialTokens,
    workers: int,
    errors: ErrorMode,
    progress: Progress | None = None,
) -> WordCounts:
    """Count the distinct words of some text files, in about one chunk of memory per worker plus the words.

    Raises:
        LmkitError: a file is not UTF-8.
        UsageError: a file cannot be read.
    """
    sources = list(paths)

    def all_chunks() -> Iterator[Chunk]:
        for number, path in enumerate(sources):
            yield from exact_chunks(read_blocks(path), specials, source=number)

    shared = _SharedChunks(all_chunks(), sum(path.stat().st_size for path in sources), progress)

    def count_some() -> WordCounter:
        counter = WordCounter(specials)
        try:
            for chunk in shared:
                counter.add(valid_utf8(chunk, str(sources[chunk.source]), errors))
        except BaseException:
            shared.stop()  # or the other threads would work to the end before anybody hears of it
            raise
        return counter

    if workers == 1:
        return count_some().result()
    with ThreadPoolExecutor(workers) as pool:
        try:
            first, *others = [job.result() for job in [pool.submit(count_some) for _ in range(workers)]]
        finally:
            shared.stop()
    for other in others:
        first.absorb(other.result())
    return first.result()
