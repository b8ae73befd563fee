"""Log-likelihoods of texts under a model, in batches: of whole documents, and of the ends of texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F

from lmkit.core.ranges import range_
from lmkit.model.memory import tokens_per_slice
from lmkit.model.transformer import TransformerLM
from lmkit.parallel.ranks import Ranks
from lmkit.training.precision import autocast

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
