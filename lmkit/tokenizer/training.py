"""Training: count the words of the corpus (`counting`), then learn merges from the counts (`merging`)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from lmkit.errors import UsageError
from lmkit.measure.environment import usable_cpus
from lmkit.measure.progress import Progress
from lmkit.recipe.vocabulary import END_OF_TEXT, MAX_VOCABULARY, NUM_BYTES
from lmkit.tokenizer.byte_alphabet import BYTE_CHARACTERS
from lmkit.tokenizer.chunks import ErrorMode, text_file_status
from lmkit.tokenizer.counting import count_words
from lmkit.tokenizer.merging import learn_merges
from lmkit.tokenizer.special_tokens import SpecialTokens
from lmkit.tokenizer.tokenizer import Tokenizer

_log = logging.getLogger("lmkit")


def train_tokenizer(
    paths: Sequence[str | Path],
    *,
    vocab_size: int,
    special_tokens: tuple[str, ...] = (END_OF_TEXT,),
    workers: int = 0,
    errors: ErrorMode = "strict",
    progress: Progress | None = None,
) -> Tokenizer:
    """Train byte-level BPE (Sennrich et al. 2016, algorithm 1, on bytes as in GPT-2) on text files.

    Most frequent pair first, of equally frequent ones the greatest (left bytes, right bytes); nothing is merged
    across the words of `pattern.PATTERN` or across special tokens. The result does not depend on `workers`.
    White space alone is text like any other. Ids: the 256 bytes, the merges in order, the special tokens in
    the order given.

    Args:
        paths: UTF-8 text files; each is a text of its own.
        vocab_size: 256 bytes + merges + special tokens. Smaller than asked, with a warning, if the corpus has no more
            pairs to merge.
        workers: threads that count; 0 takes one per usable CPU.
        errors: text that is not UTF-8 stops the training ("strict") or is read as U+FFFD ("replace").
        progress: called with ("count words", bytes, bytes) and ("learn merges", merges, merges).

    Raises:
        UsageError: a file is missing, the corpus is empty, or `vocab_size` or `special_tokens` cannot be.
        LmkitError: a file is not UTF-8.
    """
    _check(vocab_size, special_tokens)
    files = [Path(path) for path in paths]
    total = sum(text_file_status(path).st_size for path in files)
    if total == 0:
        names = ", ".join(str(path) for path in files) or "no files"
        raise UsageError(f"the corpus is empty: {names}", hint="give at least one file with text in it")
    words = count_words(
        files,
        specials=SpecialTokens(dict.fromkeys(special_tokens, 0)),
        workers=workers or usable_cpus(),
        errors=errors,
        progress=progress,
    )
    if special_tokens and not words.num_special:
        _log.warning("no special token (%s) occurs in the corpus", ", ".join(special_tokens))
    num_merges = vocab_size - NUM_BYTES - len(special_tokens)
    report = None if progress is None else lambda done, total: progress("learn merges", done, total)
    merges = learn_merges(words, num_merges, report)
    if len(merges) < num_merges:
        reached = NUM_BYTES + len(merges) + len(special_tokens)
        _log.warning(
            "the corpus has no more pairs to merge: the vocabulary is %d, not %d", reached, vocab_size
        )
    return _tokenizer(merges, special_tokens)


def _check(vocab_size: int, special_tokens: tuple[str, ...]) -> None:
    if "" in special_tokens or len(set(special_tokens)) != len(special_tokens):
        raise UsageError("special tokens must be distinct and not empty", hint="name each once")
    for text in special_tokens:
        if len(text.encode()) == 1:
            raise UsageError(
                f"the special token {text!r} is a single byte, which is a token already",
                hint="choose a longer one",
            )
        if text in BYTE_CHARACTERS:
            raise UsageError(
                f"the special token {text!r} is how tokenizer.json writes a single byte",
                hint="choose a longer one",
            )
    least = NUM_BYTES + len(special_tokens)
    if not least <= vocab_size <= MAX_VOCABULARY:
        raise UsageError(
            f"vocab_size = {vocab_size}: must be {least} (256 bytes + {len(special_tokens)} special tokens) "
            f"to {MAX_VOCABULARY}",
            hint=f"ask for at least {least}",
        )


def _tokenizer(merges: Sequence[tuple[int, int]], special_tokens: tuple[str, ...]) -> Tokenizer:
    tokens = [bytes([byte]) for byte in range(NUM_BYTES)]
    pairs = []
    for left, right in merges:
        pairs.append((tokens[left], tokens[right]))
        tokens.append(tokens[left] + tokens[right])
    return Tokenizer(vocab=dict(enumerate(tokens)), merges=pairs, special_tokens=special_tokens)
