"""The distinct words of a corpus and how often each occurs, counted by several threads.

Every thread takes the next chunk of text and counts in a table of its own, and the tables are added up at the end;
sums do not depend on who counted what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from lmkit.measure.progress import Progress
from lmkit.tokenizer.chunks import Chunk, ErrorMode, exact_chunks, read_blocks, valid_utf8
from lmkit.tokenizer.native import word_counter
from lmkit.tokenizer.special_tokens import SpecialTokens
from lmkit.tokenizer.word_counter import WordCounter, WordCounts
from lmkit.tokenizer.workers import share_out


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
    total_bytes = sum(path.stat().st_size for path in paths)
    done_bytes = 0

    def chunks() -> Iterator[Chunk]:
        nonlocal done_bytes
        for number, path in enumerate(paths):
            for chunk in exact_chunks(read_blocks(path), specials, source=number):
                yield chunk
                done_bytes += chunk.num_bytes  # all but one chunk per worker are done by now
                if progress is not None:
                    progress("count words", done_bytes, total_bytes)

    def count(counter: WordCounter) -> Callable[[Chunk], None]:
        return lambda chunk: counter.add(valid_utf8(chunk, str(paths[chunk.source]), errors).data)

    counters = [word_counter(specials) for _ in range(workers)]
    share_out(chunks(), [count(counter) for counter in counters])
    first, *others = counters
    for other in others:
        first.absorb(other)
    return first.result()
