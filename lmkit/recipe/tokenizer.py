"""`[tokenizer]`: byte-level BPE, trained on the training part of the corpus or taken from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from lmkit.recipe.table import Table, Workers
from lmkit.recipe.vocabulary import END_OF_TEXT, MAX_VOCABULARY, NUM_BYTES


class TokenizerConfig(Table):
    vocab_size: Annotated[int, Field(gt=0, le=MAX_VOCABULARY)] = 10_000
    """256 bytes + merges + special tokens."""
    special_tokens: tuple[str, ...] = (END_OF_TEXT,)
    """Never split, never merged across; `<|endoftext|>` ends every document."""
    workers: Workers = 0
    """Threads that train it; 0: one per CPU. The result does not depend on it."""
    path: Path | None = None
    """Use this tokenizer.json instead of training one."""

    @model_validator(mode="after")
    def _room_for_bytes_and_specials(self) -> TokenizerConfig:
        if len(set(self.special_tokens)) != len(self.special_tokens) or "" in self.special_tokens:
            raise ValueError("special_tokens must be distinct and not empty")
        minimum = NUM_BYTES + len(self.special_tokens)
        if self.vocab_size < minimum:
            raise ValueError(
                f"vocab_size is {self.vocab_size}, but 256 bytes and {len(self.special_tokens)} special "
                f"tokens need at least {minimum}"
            )
        return self
