"""Train a tokenizer: count the words of a corpus on several threads, then learn merges from the counts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

from lmkit.core.bpe import Pair
from lmkit.errors import UsageError
from lmkit.measure.environment import usable_cpus
from lmkit.recipe import END_OF_TEXT, MAX_TOKEN_BYTES, MAX_VOCABULARY, NUM_BYTES
from lmkit.streams import Progress
from lmkit.tokenizer.chunks import Chunk, ErrorMode, TextFiles, exact_chunks, read_blocks, valid_utf8
from lmkit.tokenizer.engine import WordCounter, WordCounts, new_counter, new_encoder, share_out
from lmkit.tokenizer.merge_learner import learn_merges_fast
from lmkit.tokenizer.pretokenize import SpecialTokens
from lmkit.tokenizer.tokenizer import Tokenizer

_log = logging.getLogger("lmkit")
_PART_BYTES = 1 << 18


def train_tokenizer(
    paths: str | Path | Sequence[str | Path] | None = None,
    *,
    texts: Iterable[str] | None = None,
    vocab_size: int,
    special_tokens: str | Sequence[str] | None = (END_OF_TEXT,),
    end_of_text: str | None = None,
    separator: str | None = None,
    max_token_bytes: int = MAX_TOKEN_BYTES,
    workers: int = 0,
    errors: ErrorMode = "strict",
    progress: Progress | None = None,
) -> Tokenizer:
    """Train byte-level BPE on text files, or on strings.

    The algorithm is `core.bpe.learn_merges`. Nothing is merged across the words of GPT-2's pattern or across special
    tokens. Whitespace is text like any other. Ids: the 256 bytes, the merges in order, then the special tokens in the
    order given. The result does not depend on `workers`.

    Args:
        paths: one or more UTF-8 text files; nothing is merged across files.
        texts: strings in place of files, such as documents from a generator, which is read once; nothing is merged
            across strings.
        vocab_size: 256 bytes + merges + special tokens. The result is smaller, with a warning, if the corpus has too
            few pairs to merge.
        special_tokens: None means no special tokens.
        end_of_text: the special token that ends a text; None: that with a conventional name, see `Tokenizer.marks`.
        separator: ends a document in the files, and is no text, either; None: only special tokens do.
        max_token_bytes: no merge makes a longer token.
        workers: threads that count words; 0 means one per usable CPU.
        errors: text that is not UTF-8 stops the training ("strict") or is read as U+FFFD ("replace").
        progress: called with ("count words", bytes done, bytes) and ("learn merges", merges done, merges). The bytes
            of `texts` are those done.

    ValueError: neither or both of `paths` and `texts`. TypeError: `texts` is no iterable of strings.
    UsageError: a file is missing, the corpus is empty, or `vocab_size` or `special_tokens` are impossible.
    LmkitError: a file is not UTF-8.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "corpus.txt")
    ...     _ = path.write_text("low low low lower lower newest newest")
    ...     tokenizer = train_tokenizer(path, vocab_size=260, special_tokens=None)
    >>> tokenizer.merges[:2]
    [(b'o', b'w'), (b'l', b'ow')]
    """
    if (paths is None) == (texts is None):
        raise ValueError("give either paths of text files or texts=, an iterable of strings")
    special_tokens = (special_tokens,) if isinstance(special_tokens, str) else tuple(special_tokens or ())
    _tokenizer([], special_tokens)  # refused before the words are counted
    least = NUM_BYTES + len(special_tokens)
    if not least <= vocab_size <= MAX_VOCABULARY:
        raise UsageError(
            "tokenizer.vocab_size",
            f"vocab_size = {vocab_size}: must be {least} to {MAX_VOCABULARY} (256 bytes; special tokens: "
            f"{len(special_tokens)})",
            hint=f"use at least {least}" if vocab_size < least else f"use at most {MAX_VOCABULARY}",
        )
    specials = SpecialTokens(dict.fromkeys((*special_tokens, *filter(None, [separator])), 0))
    parts: Iterable[list[Chunk]]
    if texts is not None:
        parts, num_bytes = _parts(texts, specials), 0
    else:
        named = [paths] if isinstance(paths, (str, Path)) else paths or ()
        files = TextFiles(list(map(Path, named)), specials, errors)
        parts = ([chunk] for source in range(len(files.paths)) for chunk in files.chunks(source))
        num_bytes = files.num_bytes

    def valid(chunk: Chunk) -> bytes:
        return chunk.data if texts is not None else valid_utf8(chunk, files.paths[chunk.source], errors)

    def counted(done: int) -> None:
        if progress is not None and done:
            progress("count words", done, num_bytes or done)

    words = _count_words(parts, valid, specials, workers or usable_cpus(), counted)
    if texts is not None and not len(words.lengths) and not words.num_special:
        raise UsageError("text.empty", "the corpus is empty", hint="give texts that are not empty")
    if special_tokens and not words.num_special and texts is None:  # texts end without a token
        _log.warning("no special token (%s) occurs in the corpus", ", ".join(special_tokens))
    num_merges = vocab_size - least
    report = None if progress is None else partial(progress, "learn merges")
    merges = learn_merges_fast(words, num_merges, report, max_token_bytes=max_token_bytes)
    if len(merges) < num_merges:
        _log.warning(
            "the corpus has no more pairs to merge into tokens of at most %d bytes: the vocabulary is %d, not %d",
            *(max_token_bytes, least + len(merges), vocab_size),
        )
    tokenizer = _tokenizer(merges, special_tokens)
    return tokenizer if end_of_text is None else tokenizer.with_end_of_text(end_of_text)


def _tokenizer(merges: Sequence[Pair], special_tokens: tuple[str, ...]) -> Tokenizer:
    """Return a trained tokenizer; refuse special tokens that its file could not tell from others."""
    hint = "choose another one; name each special token once"
    try:
        tokenizer = Tokenizer.from_merges(merges, special_tokens)
    except ValueError as error:
        message = f"special_tokens = {list(special_tokens)}: {error}"
        raise UsageError("tokenizer.special_tokens", message, hint=hint) from None
    for text, token_id in tokenizer.special_ids.items():
        if token_id < NUM_BYTES + len(merges):
            message = f"special_tokens: {text!r} is written like a byte or a learned token in tokenizer.json"
            raise UsageError("tokenizer.special_tokens", message, hint=hint)
    return tokenizer


def _parts(texts: Iterable[str], specials: SpecialTokens) -> Iterator[list[Chunk]]:
    """Yield about `_PART_BYTES` at a time: of many short texts, or of a long one."""
    part: list[Chunk] = []
    size = 0
    for text in [b""] if isinstance(texts, str) else texts:
        if not isinstance(text, str):
            raise TypeError("texts must be an iterable of strings")
        for chunk in exact_chunks([text.encode()], specials):
            part.append(chunk)
            if (size := size + chunk.num_bytes) >= _PART_BYTES:
                yield part
                part, size = [], 0
    yield part


def _count_words(
    parts: Iterable[list[Chunk]],
    valid: Callable[[Chunk], bytes],
    specials: SpecialTokens,
    workers: int,
    report: Callable[[int], None],
) -> WordCounts:
    """Count the distinct words, in the memory of a few parts per worker plus each worker's table of words."""
    done_bytes = 0

    def count(counter: WordCounter, part: list[Chunk]) -> None:
        for chunk in part:
            counter.add(valid(chunk))

    counters: list[Any] = list(map(new_counter, repeat(specials, workers)))  # all in C, or all in Python
    with closing(share_out(parts, list(map(partial, repeat(count), counters)))) as results:
        for part, _ in results:
            done_bytes += sum(chunk.num_bytes for chunk in part)
            report(done_bytes)
    words: WordCounts = counters[0].result(*counters[1:])
    return words


@dataclass(frozen=True)
class TokenizerFacts:
    """The result of `inspect_tokenizer`. The longest tokens come first, with U+FFFD where one is not whole UTF-8;
    `bytes_per_token` leaves special tokens out, and is None without a text."""

    path: str
    vocab_size: int
    num_merges: int
    special_tokens: tuple[str, ...]
    longest_tokens: tuple[str, ...]
    sha256: str
    bytes_per_token: float | None


def inspect_tokenizer(
    path: str | Path, *, text: str | Path | None = None, longest: int = 10
) -> TokenizerFacts:
    """Describe a `tokenizer.json` with its `longest` tokens; with a text file, measure the compression on it. Bytes
    of the text that are not UTF-8 are read as U+FFFD."""
    tokenizer = Tokenizer.load(path)
    encode, num_bytes, num_tokens = new_encoder(tokenizer.merge_table), 0, 0
    for chunk in () if text is None else exact_chunks(read_blocks(Path(text)), tokenizer.specials):
        data = valid_utf8(chunk, Path(text or ""), "replace")
        ids, marks = encode(data, tokenizer.specials)
        marks, no_text = tokenizer.specials_in(ids, marks)
        num_bytes += len(data) - no_text
        num_tokens += len(ids) - len(marks)
    special = set(tokenizer.special_ids.values())
    ordinary = [token for token_id, token in tokenizer.vocab.items() if token_id not in special]
    ordinary.sort(key=lambda token: (-len(token), token))
    return TokenizerFacts(
        path=str(path),
        vocab_size=tokenizer.vocab_size,
        num_merges=len(tokenizer.merges),
        special_tokens=tokenizer.special_tokens,
        longest_tokens=tuple(token.decode("utf-8", "replace") for token in ordinary[:longest]),
        sha256=tokenizer.sha256,
        bytes_per_token=num_bytes / num_tokens if num_tokens else None,
    )
