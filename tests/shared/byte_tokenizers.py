"""Tokenizers of the 256 bytes."""

from collections.abc import Sequence
from typing import Any

from lmkit.tokenizer import Tokenizer


def of_bytes(*special_tokens: str, merges: Sequence[tuple[bytes, bytes]] = (), **options: Any) -> Tokenizer:
    """Return a tokenizer of the bytes, the merges in order and special tokens, with these options."""
    vocab = dict(Tokenizer.from_merges(merges).vocab)
    return Tokenizer(vocab=vocab, merges=merges, special_tokens=special_tokens, **options)
