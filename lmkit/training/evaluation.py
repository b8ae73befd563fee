"""Evaluate a model on held-out tokens: loss in nats per token, perplexity, bits per byte."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F

from lmkit.core.batches import evaluation_windows
from lmkit.core.ranges import range_
from lmkit.data.token_files import TokenFile, document_starts
from lmkit.model.memory import tokens_per_slice
from lmkit.model.transformer import TransformerLM
from lmkit.parallel.collectives import agree
from lmkit.parallel.ranks import Ranks
from lmkit.recipe.tables import ModelConfig
from lmkit.training.precision import autocast


@dataclass(frozen=True)
class HeldOut:
    """Held-out data.

    Attributes:
        tokens: one-dimensional token ids, usually a memory map.
        bytes_per_token: of the text of those that count; None if unknown.
        context_length: longest window.
        rows: windows per batch.
        mask: of a `TokenFile`: the tokens that count; None: all.
        borders: positions at which documents begin that do not see one another; None: they do.
    """

    tokens: np.ndarray
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
    asked_to_stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Return the mean loss over consecutive, non-overlapping windows from the start of the held-out tokens; nan if
    none of their tokens counts.

    Every rank calls it and gets the same result. Batch b goes to rank b mod world_size.

    Args:
        model: the plain model. Every rank calls `model.loss` equally often, because it may gather weights.
        ranks: this process's place; None: as in torch.distributed's default group, alone without one.
        max_batches: only this many batches, over all ranks; None: the whole file.
        asked_to_stop: called once per batch; if true on any rank, all return None.
    """
    ranks = ranks or Ranks.current()
    windows = evaluation_windows(
        held_out.tokens,
        held_out.context_length,
        held_out.rows,
        max_batches,
        mask=held_out.mask,
        borders=held_out.borders,
    )
    nats, tokens = 0.0, 0
    was_training = model.training
    model.eval()
    with range_("evaluation"), torch.no_grad(), autocast(ranks.device, precision):
        while batches := list(islice(windows, ranks.world_size)):
            # Where the last round is too short for a rank, its batch is another rank's, and does not count.
            rows, wanted = batches[min(ranks.rank, len(batches) - 1)]
            if agree(ranks, stop=asked_to_stop()):
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


@dataclass(frozen=True)
class EvaluateResult:
    """Result of evaluating a model on a whole token file; loss in nats per token.

    Attributes:
        checkpoint: the model's folder.
        step: of the checkpoint; None: a Hugging Face folder.
    """

    checkpoint: str
    step: int | None
    tokens_file: str
    loss: float
    perplexity: float
    bits_per_byte: float | None
    tokens: int
    bytes_per_token: float | None = None

    def __str__(self) -> str:
        bits = "" if self.bits_per_byte is None else f", {self.bits_per_byte:.4f} bits per byte"
        return (
            f"checkpoint  {self.checkpoint}\n"
            f"tokens      {self.tokens:,} of {self.tokens_file}\n"
            f"result      loss {self.loss:.4f}, perplexity {self.perplexity:.2f}{bits}"
        )


# The probability of texts

TOKENS_AT_ONCE = 8192
"""Of a batch, padding included."""


class Scored(NamedTuple):
    """Ids of which the last `num_scored` are scored, but not the first; at most `context_length + 1`."""

    ids: Sequence[int] | np.ndarray
    num_scored: int


def windows_of(before: Sequence[int], ids: np.ndarray, context_length: int) -> Iterator[Scored]:
    """Cut a document into windows that score each of its ids once, as lm-eval's `loglikelihood_rolling` does.

    Windows do not overlap, but the last one sees a whole context.

    Args:
        before: ids before the document, at least one.
        ids: (tokens) of the document.
    """
    whole = np.concatenate((before, ids)).astype(np.int64)
    for first in range(0, len(ids), context_length):
        last = min(first + context_length, len(ids))
        end = len(before) + last
        yield Scored(whole[max(0, end - context_length - 1) : end], last - first)


@torch.no_grad()
def log_likelihoods(
    model: TransformerLM, texts: Sequence[Scored], ranks: Ranks | None = None, *, precision: str = "fp32"
) -> list[float]:
    """Return the sum of log p(id | ids before it), in nats, over the scored ids of each text.

    Every rank calls it and gets all results. Texts of similar length share a batch; the logits of ids that are not
    scored are not computed.

    Args:
        model: the plain model, in eval mode.
    """
    ranks = ranks or Ranks.current()
    found: dict[int, float] = {}
    with range_("likelihood"), autocast(ranks.device, precision):
        for number, batch in enumerate(_batches(texts)):
            if number % ranks.world_size == ranks.rank:
                sums = _sums(model, [texts[i] for i in batch], ranks.device)
                found |= zip(batch, sums.tolist(), strict=True)
    if ranks.world_size > 1:
        parts: list[dict[int, float]] = [{}] * ranks.world_size
        dist.all_gather_object(parts, found)
        found = {i: value for part in parts for i, value in part.items()}
    return [found[i] for i in range(len(texts))]


def _batches(texts: Sequence[Scored]) -> Iterator[list[int]]:
    """Yield indices of texts, the longest first: if memory does not suffice, the first batch shows it."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i].ids), reverse=True)
    while order:
        rows = max(1, TOKENS_AT_ONCE // len(texts[order[0]].ids))
        yield order[:rows]
        order = order[rows:]


def _sums(model: TransformerLM, texts: Sequence[Scored], device: torch.device) -> torch.Tensor:
    """Return the log-likelihood of each text of a batch, (texts) in float64 on the CPU."""
    width = max(len(text.ids) for text in texts) - 1
    inputs = np.zeros((len(texts), width), np.int64)  # padding comes last: no token before it sees it
    rows, places, targets = [], [], []
    for number, text in enumerate(texts):
        ids = np.asarray(text.ids, np.int64)
        inputs[number, : len(ids) - 1] = ids[:-1]
        rows.append(np.full(text.num_scored, number))
        places.append(np.arange(len(ids) - 1 - text.num_scored, len(ids) - 1))
        targets.append(ids[len(ids) - text.num_scored :])
    row, place, target = (
        torch.from_numpy(np.concatenate(parts)).to(device) for parts in (rows, places, targets)
    )
    hidden = model.hidden_states(torch.from_numpy(inputs).to(device))[row, place]  # (scored, d_model)
    losses = []
    most = tokens_per_slice(len(model.lm_head.weight), device.type)
    for some, wanted in zip(hidden.split(most), target.split(most), strict=True):
        logits = model.lm_head(some)  # (slice, vocab_size)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses.append(F.cross_entropy(wide, wanted, reduction="none"))
    sums = torch.zeros(len(texts), dtype=torch.float64)
    return sums.index_add_(0, row.cpu(), -torch.cat(losses).double().cpu())
