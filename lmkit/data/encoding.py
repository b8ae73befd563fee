"""Encode text files into one token file, in parallel and in constant memory.

Every worker encodes whole chunks by itself, and the ids are written in the order of the text: the file is the same
for any number of workers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from lmkit.data.corpora import PathOrPaths, as_paths, plain_text_files
from lmkit.data.token_files import TokenFileWriter, TokenMeta, sidecar_path
from lmkit.errors import UsageError
from lmkit.measure.environment import usable_cpus
from lmkit.measure.progress import Progress
from lmkit.storage.outputs import refuse_existing, refuse_replacing
from lmkit.tokenizer import END_OF_TEXT, Tokenizer
from lmkit.tokenizer.chunks import Chunk, ErrorMode, TextFiles
from lmkit.tokenizer.engine import Encoder, share_out

_END = END_OF_TEXT.encode()
_TAIL_BYTES = 4096  # the end of a source, which is searched for its last end-of-text token


def encode_corpus(
    sources: PathOrPaths,
    output: str | Path,
    tokenizer: Tokenizer,
    *,
    workers: int = 0,
    errors: ErrorMode = "strict",
    force: bool = False,
    progress: Progress | None = None,
) -> TokenMeta:
    """Encode UTF-8 text files into one token file, in memory that does not grow with their size.

        >>> encode_corpus("stories.txt", "tokens.npy", tokenizer)        # doctest: +SKIP
        >>> encode_corpus(["a.txt", "b.jsonl"], "tokens.npy", tokenizer)  # doctest: +SKIP

    Documents end with `<|endoftext|>`. A source without it at its end (trailing white space is ignored) gets one, so
    that its last document does not run into the next source. A tokenizer without that token adds none. The prefix and
    suffix of the tokenizer stand around every document, the end-of-text token after them. A source that
    ends in `.jsonl` holds one document a line, under the key "text".

    Args:
        sources: one path or several.
        output: the token file; ends in `.npy`.
        workers: threads that encode; 0 takes one per usable CPU. The file does not depend on it.
        errors: stop at text that is not UTF-8 ("strict") or read it as U+FFFD ("replace").
        force: overwrite `output`.
        progress: called with ("encode", bytes done, bytes in all).

    Raises:
        UsageError: a source is missing ("text.unreadable") or all are empty ("text.empty"); `output` exists
            ("output.exists"), does not end in `.npy` ("tokens.name") or would replace a source
            ("output.replaces_source").
        LmkitError: a source is not UTF-8 ("text.not_utf8") or changed while it was read ("corpus.changed").
    """
    output = Path(output)
    paths = as_paths(sources)
    _check_output(output, paths, force=force)
    with plain_text_files(paths, output.parent, errors=errors, progress=progress) as texts:
        files = TextFiles(texts, tokenizer.specials, errors)
        return _encode(files, output, tokenizer, workers or usable_cpus(), progress)


def _encode(
    files: TextFiles, output: Path, tokenizer: Tokenizer, workers: int, progress: Progress | None
) -> TokenMeta:
    end_of_text = tokenizer.end_of_text_id
    num_documents = done_bytes = 0
    begins = True  # whether the next token begins a document
    digest = hashlib.sha256()
    with TokenFileWriter(
        output, vocab_size=tokenizer.vocab_size, tokenizer_sha256=tokenizer.sha256
    ) as writer:

        def chunks() -> Iterator[Chunk]:
            for source, size in enumerate(files.sizes):
                tail = b""
                for chunk in files.chunks(source):
                    digest.update(chunk.data)
                    tail = (tail + chunk.data[-_TAIL_BYTES:])[-_TAIL_BYTES:]
                    yield chunk
                if end_of_text is not None and size and not tail.rstrip().endswith(_END):
                    yield Chunk(source, size, 0, _END)
                elif end_of_text is None and size and tokenizer.suffix:
                    yield Chunk(source, size, 0, b"")  # the end of the only document

        def encode(encoder: Encoder) -> Callable[[Chunk], np.ndarray]:
            return lambda chunk: encoder.encode(files.text_of(chunk), tokenizer.specials)

        def write(chunk: Chunk, ids: np.ndarray) -> None:
            nonlocal num_documents, done_bytes, begins
            if tokenizer.prefix or tokenizer.suffix:
                begins = begins or chunk.offset == 0
                writer.append(_framed(ids, tokenizer, begins))
                if len(ids):
                    begins = bool(ids[-1] == end_of_text)
                elif end_of_text is None:
                    writer.append(np.array(tokenizer.suffix, np.int32))
            else:
                writer.append(ids)
            num_documents += int(np.count_nonzero(ids == end_of_text)) if end_of_text is not None else 0
            done_bytes += chunk.num_bytes
            if progress is not None:
                progress("encode", done_bytes, files.num_bytes)

        share_out(chunks(), [encode(tokenizer.new_encoder()) for _ in range(workers)], write)
        return writer.finish(
            num_documents=num_documents if end_of_text is not None else len(files.paths),
            num_bytes=files.num_bytes,
            source_sha256=digest.hexdigest(),
        )


def _framed(ids: np.ndarray, tokenizer: Tokenizer, begins: bool) -> np.ndarray:
    """Put the prefix before the documents that begin in a chunk, and the suffix before each end-of-text token."""
    ends = np.flatnonzero(ids == tokenizer.end_of_text_id)
    starts = np.concatenate(([0] if begins else [], ends + 1)).astype(np.int64)
    starts = starts[starts < len(ids)]
    places = np.concatenate(
        (np.repeat(starts, len(tokenizer.prefix)), np.repeat(ends, len(tokenizer.suffix)))
    )
    added = np.concatenate(
        (np.tile(tokenizer.prefix, len(starts)), np.tile(tokenizer.suffix, len(ends)))
    ).astype(np.int32)
    return np.insert(ids, places, added)


def _check_output(output: Path, sources: Iterable[Path], *, force: bool) -> None:
    """Refuse an output before any work is done for it."""
    if output.suffix != ".npy":
        raise UsageError(
            "tokens.name",
            f"{output}: a token file ends in .npy",
            hint=f"name it {output.with_suffix('.npy')}",
        )
    refuse_existing(output, force=force)
    refuse_replacing((output, sidecar_path(output)), sources)
