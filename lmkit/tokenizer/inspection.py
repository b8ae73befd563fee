"""Facts about a tokenizer, and how far it compresses a text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lmkit.tokenizer.chunks import exact_chunks, read_blocks, valid_utf8
from lmkit.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenizerDescription:
    vocab_size: int
    num_merges: int
    special_tokens: tuple[str, ...]
    longest_tokens: tuple[bytes, ...]
    """Ordinary tokens, longest first."""
    sha256: str
    bytes_per_token: float | None
    """Bytes of the text over its number of tokens; None without a text, or with an empty one."""


def describe(tokenizer: Tokenizer, *, text: Path | None = None, longest: int = 10) -> TokenizerDescription:
    """Describe a tokenizer; with a file of text (any bytes will do: what is not UTF-8 is replaced), measure on it.

    Raises:
        UsageError: the text cannot be read.
    """
    special = set(tokenizer.special_ids.values())
    ordinary = [token for token_id, token in tokenizer.vocab.items() if token_id not in special]
    return TokenizerDescription(
        vocab_size=tokenizer.vocab_size,
        num_merges=len(tokenizer.merges),
        special_tokens=tokenizer.special_tokens,
        longest_tokens=tuple(sorted(ordinary, key=lambda token: (-len(token), token))[:longest]),
        sha256=tokenizer.sha256,
        bytes_per_token=None if text is None else bytes_per_token(tokenizer, text),
    )


def bytes_per_token(tokenizer: Tokenizer, path: Path) -> float | None:
    """Return the bytes of a file over the number of its tokens; None for an empty file."""
    encoder = tokenizer.chunk_encoder()
    num_bytes = num_tokens = 0
    for chunk in exact_chunks(read_blocks(path), tokenizer.specials):
        num_bytes += chunk.num_bytes
        data = valid_utf8(chunk, str(path), "replace").data
        num_tokens += len(encoder.encode(data, tokenizer.specials))
    return num_bytes / num_tokens if num_tokens else None
