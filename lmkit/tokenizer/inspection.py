"""Describe a tokenizer: its size, its longest tokens, and how much it compresses a text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lmkit.tokenizer.chunks import exact_chunks, read_blocks, valid_utf8
from lmkit.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenizerFacts:
    """The result of `inspect_tokenizer`.

    Attributes:
        path: the tokenizer's file.
        longest_tokens: ordinary tokens, longest first; U+FFFD where a token is not whole UTF-8.
        bytes_per_token: bytes of the text per token, special tokens left out; None without a text.
    """

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
    """Describe a `tokenizer.json`; with a text file, measure the compression on it.

    Args:
        text: any file; bytes that are not UTF-8 are read as U+FFFD.
        longest: how many of the longest tokens to list.
    """
    tokenizer = Tokenizer.load(path)
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
        bytes_per_token=None if text is None else _bytes_per_token(tokenizer, Path(text)),
    )


def _bytes_per_token(tokenizer: Tokenizer, path: Path) -> float | None:
    encoder = tokenizer.new_encoder()
    num_bytes = num_tokens = 0
    for chunk in exact_chunks(read_blocks(path), tokenizer.specials):
        text = valid_utf8(chunk, path, "replace")
        ids = encoder.encode(text, tokenizer.specials)
        marks, no_text = tokenizer.specials_in(ids)
        num_bytes += len(text) - no_text
        num_tokens += len(ids) - len(marks)
    return num_bytes / num_tokens if num_tokens else None
