"""Evaluate a model on held-out tokens: loss in nats per token, perplexity, bits per byte."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lmkit.core.batches import Tokens, evaluation_windows
from lmkit.core.ranges import range_
from lmkit.data.overlap import Overlap, shown
from lmkit.data.token_files import TokenFile, document_starts
from lmkit.model.transformer import TransformerLM
from lmkit.parallel.collectives import agree
from lmkit.parallel.ranks import Ranks
from lmkit.recipe.tables import ModelConfig
from lmkit.training.precision import autocast

TOKENS_AT_ONCE = 8192
"""Of a batch, padding included, where nothing else says how many."""


@dataclass(frozen=True)
class HeldOut:
    """Held-out data.

    Attributes:
        tokens: usually memory-mapped.
        bytes_per_token: of the text of those that count; None if unknown.
        context_length: longest window.
        rows: windows per batch.
        mask: of a `TokenFile`: the tokens that count; None: all.
        borders: positions at which documents begin that do not see one another; None: they do.
    """

    tokens: Tokens
    bytes_per_token: float | None
    context_length: int
    rows: int
    mask: np.ndarray | None = None
    borders: np.ndarray | None = None


def held_out_of(file: TokenFile, model: ModelConfig, *, context_length: int, rows: int) -> HeldOut:
    """Return a token file as held-out data of a model."""
    meta = file.meta
    num_bytes, num_tokens = meta.num_bytes, meta.num_tokens
    if meta.counted_tokens is not None:
        num_bytes, num_tokens = meta.counted_bytes or 0, meta.counted_tokens
    bytes_per_token = num_bytes / num_tokens if num_bytes else None
    borders = document_starts(file) if model.separate_documents else None
    return HeldOut(file.tokens, bytes_per_token, context_length, rows, file.mask, borders)


@dataclass(frozen=True)
class Evaluation:
    """Loss in nats per token. Bits per byte compare across tokenizers.

    Attributes:
        perplexity: exp(loss); infinite if no float holds it.
        bits_per_byte: loss / ln 2 / bytes_per_token.
        tokens: that were scored.
        bytes_per_token: bytes of the whole text per token, of those that count; marks are tokens without bytes. Thus
            the first token of a file, which nothing predicts, counts like the mean of the others. None: not known.
    """

    loss: float
    perplexity: float
    bits_per_byte: float | None
    tokens: int
    bytes_per_token: float | None = None


def evaluate(
    model: TransformerLM,
    held_out: HeldOut,
    ranks: Ranks | None = None,
    *,
    precision: str = "fp32",
    max_batches: int | None = None,
    signals: Sequence[int] = (),
) -> Evaluation | None:
    """Return the mean loss over consecutive, non-overlapping windows from the start of the held-out tokens; nan if
    none of their tokens counts.

    Every rank calls it and gets the same result. Batch b goes to rank b mod world_size.

    Args:
        model: the plain model. Every rank calls `model.loss` equally often, because it may gather weights.
        ranks: this process's place; None: as in torch.distributed's default group, alone without one.
        max_batches: only this many batches, over all ranks; None: the whole file.
        signals: that this rank received; looked at before each batch; if a rank has one, all return None.
    """
    ranks = ranks or Ranks.current()
    sizes = held_out.context_length, held_out.rows
    marks: Any = {"mask": held_out.mask, "borders": held_out.borders}
    windows = evaluation_windows(held_out.tokens, *sizes, max_batches, **marks)
    nats, tokens = 0.0, 0
    was_training = model.training
    model.eval()
    with range_("evaluation"), torch.no_grad(), autocast(ranks.device, precision):
        while batches := list(islice(windows, ranks.world_size)):
            # Where the last round is too short for a rank, its batch is another rank's, and does not count.
            rows, wanted = batches[min(ranks.rank, len(batches) - 1)]
            if agree(ranks, stop=bool(signals)):
                model.train(was_training)
                return None
            inputs, targets = rows.to(ranks.device), wanted.to(ranks.device)  # (rows, seq)
            loss = model.loss(inputs, targets)
            if ranks.rank < len(batches):
                counted = int((wanted >= 0).sum())
                nats += loss.item() * counted
                tokens += counted
    model.train(was_training)
    if ranks.world_size > 1:
        summed = torch.tensor([nats, tokens], dtype=torch.float64, device=ranks.device)
        dist.all_reduce(summed)
        nats, tokens = summed.tolist()
    return summarise(nats / tokens if tokens else math.nan, int(tokens), held_out.bytes_per_token)


def summarise(loss: float, tokens: int, bytes_per_token: float | None) -> Evaluation:
    """Add perplexity and bits per byte to a mean loss in nats per token."""
    try:
        perplexity = math.exp(loss)
    except OverflowError:  # above 709 nats
        perplexity = math.inf
    bits_per_byte = None if bytes_per_token is None else loss / math.log(2) / bytes_per_token
    return Evaluation(loss, perplexity, bits_per_byte, tokens, bytes_per_token)


@dataclass(frozen=True, kw_only=True)
class EvaluateResult(Evaluation):
    """Result of evaluating a model on a whole token file."""

    checkpoint: str
    step: int | None
    tokens_file: str
    overlap: Overlap | None = None

    def __str__(self) -> str:
        bits = "" if self.bits_per_byte is None else f", {self.bits_per_byte:.4f} bits per byte"
        return (
            f"checkpoint  {self.checkpoint}\n"
            f"tokens      {self.tokens:,} of {self.tokens_file}\n"
            f"result      loss {self.loss:.4f}, perplexity {self.perplexity:.2f}{bits}" + shown(self.overlap)
        )
