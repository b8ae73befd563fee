"""From logits to the next token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lmkit.errors import UsageError


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    Attributes:
        temperature: divides the logits; below 1 the likely becomes likelier, 0 always takes the likeliest.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: of those, keep the smallest set whose probability reaches p (Holtzman et al. 2020, eq. 2-3).

    Raises:
        UsageError: a setting is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (0 <= self.temperature < math.inf):
            raise UsageError(
                f"generate.temperature: must be 0 or more, got {self.temperature}", hint="0 is greedy"
            )
        if self.top_k < 0:
            raise UsageError(
                f"generate.top_k: must be 0 or more, got {self.top_k}", hint="0 keeps all tokens"
            )
        if not 0 < self.top_p <= 1:
            raise UsageError(
                f"generate.top_p: must be above 0 and at most 1, got {self.top_p}", hint="1 keeps all tokens"
            )


def choose(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> Tensor:
    """Draw one token per row.

    Args:
        logits: (batch, vocab_size)
        uniforms: (batch) float32 random numbers from [0, 1); each decides its row alone.

    Returns:
        (batch) int64 token ids.
    """
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    # The largest logit is taken off before the division, which then cannot overflow upwards.
    scores = logits.double()
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / sampling.temperature  # (batch, vocab_size)
    ids = None
    if 0 < sampling.top_k < scores.shape[-1]:
        scores, ids = scores.topk(sampling.top_k)  # (batch, top_k), likeliest first
    elif sampling.top_p < 1:
        scores, ids = scores.sort(descending=True, stable=True)
    p = scores.softmax(dim=-1)
    if sampling.top_p < 1:
        likelier = p.cumsum(dim=-1) - p  # probability of all tokens before this one
        p = p.masked_fill(likelier >= sampling.top_p, 0.0)
    # The inverse of the cumulative distribution. A float32 below 1 is at most 1 - 2^-24, so that in float64 the
    # product stays below the total, and a token of probability 0 is never met.
    cumulative = p.cumsum(dim=-1)
    drawn = uniforms.double() * cumulative[:, -1]
    choice = torch.searchsorted(cumulative, drawn.unsqueeze(1), right=True)  # (batch, 1)
    return (choice if ids is None else ids.gather(1, choice)).squeeze(1)
