"""`[generate]`: how text is sampled."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lmkit.recipe.table import Count, NonNegativeFloat, Table


class GenerateConfig(Table):
    prompts: tuple[str, ...] = ("",)
    """An empty prompt starts from end-of-text: a new document."""
    max_new_tokens: Annotated[int, Field(gt=0, le=1_000_000_000)] = 256
    """Of each text, at most."""
    temperature: NonNegativeFloat = 0.8
    """How daring; 0 takes the likeliest token (greedy)."""
    top_k: Count = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Keep the smallest set of tokens whose probability reaches p (Holtzman et al. 2020)."""
    seed: Count = 0
    """Another seed, another text."""
    stop_at_end: bool = True
    """Stop at `<|endoftext|>`."""
