"""The tokens and batches of `lmkit bench lm-matrix`."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from lmkit.bench.context import Context
from lmkit.errors import UsageError, reason
from lmkit.storage.inputs import refuse_irregular

if TYPE_CHECKING:
    import numpy as np

    from lmkit.bench.lm_matrix import Options
    from lmkit.core.batches import TokenBatches
    from lmkit.parallel.ranks import Ranks

STORIES = 400  # about half a megabyte
HELD_OUT = 0.1
"""The share of the tokens, at their end, that no training sees."""


def tokens_of(options: Options, seed: int) -> np.ndarray:
    """Return the tokens: the token file, memory-mapped, or the bytes of a text or of generated stories."""
    import numpy as np

    from lmkit.data.synth import generate_stories
    from lmkit.data.token_files import open_tokens

    if options.tokens is not None and options.tokens.suffix == ".npy":
        return open_tokens(options.tokens).tokens
    if options.tokens is not None:
        return _bytes_of(options.tokens)
    text = b"\n".join(story.encode() for story in islice(generate_stories(seed), STORIES))
    return np.frombuffer(text, dtype=np.uint8).astype(np.uint16)


def _bytes_of(path: Path) -> np.ndarray:
    """Return a text's bytes, memory-mapped."""
    import numpy as np

    try:
        refuse_irregular(path)
        return np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:  # numpy refuses empty files with a ValueError
        why = reason(error) if isinstance(error, OSError) else "an empty file"
        hint = "name a token file (.npy) or a text"
        raise UsageError("bench.no_text", f"bench.lm_matrix.tokens: {path}: {why}", hint=hint) from error


def parted(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens to train on and those that are held out."""
    border = int(len(tokens) * (1 - HELD_OUT))
    return tokens[:border], tokens[border:]


def check_batches(options: Options, tokens: np.ndarray, ranks: Ranks) -> None:
    """Refuse a batch that the ranks do not divide, and a context longer than the text."""
    if options.batch_size % ranks.world_size:
        raise UsageError(
            "bench.batch_size",
            f"bench.lm_matrix.batch_size: {options.batch_size} sequences are not divisible by "
            f"{ranks.world_size} ranks",
            hint=f"give a multiple of {ranks.world_size}",
        )
    if (shortest := min(map(len, parted(tokens)))) <= options.context_length:
        raise UsageError(
            "bench.context_length",
            f"bench.lm_matrix.context_length: {options.context_length} + 1 tokens are more than the held-out text "
            f"has, {shortest}",
            hint="give a shorter context" + ("" if options.tokens is None else ", or a longer token file"),
        )


def batches_of(context: Context, tokens: np.ndarray, ranks: Ranks) -> TokenBatches:
    """Return the batches of one of the ranks."""
    from lmkit.core.batches import TokenBatches

    return TokenBatches(
        tokens,
        batch_size=context.options.batch_size,
        context_length=context.options.context_length,
        seed=context.recipe.run.seed,
        rank=ranks.rank,
        world_size=ranks.world_size,
    )
