"""Draw the next token of each text: temperature, top-k, top-p, min-p, repetition penalty.

The weight of a token with the logit z is an integer, floor(2^40 exp((z - max z) / temperature)). Sums of integers are
exact, so no order of summation changes a draw. A draw takes 64 random bits r and finds the token in whose interval
floor(r total / 2^64) falls.

Top-k, top-p and min-p need no sort. Draw from all tokens. If the token is in the set, it is the result; if not, draw
again among the likelier tokens (ties go by id). Each set is a prefix of the tokens ordered by likelihood, so every
token of the set is drawn with its exact probability.

The random bits depend on the text's seed, the number of the token and the number of the draw, and on nothing else: a
text is the same in any batch.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

LARGEST_WEIGHT = 1 << 40


class Sampling(NamedTuple):
    """How tokens are drawn.

    Attributes:
        temperature: divides the logits; 0 takes the largest.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of these whose probability reaches p (Holtzman et al. 2020, eq. 2-3).
        min_p: drop tokens less likely than this times the likeliest (Nguyen et al. 2024, "min-p").
        repetition_penalty: see `penalize`.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def penalize(logits: Tensor, seen: Tensor, penalty: float | Tensor) -> Tensor:
    """Divide positive logits of seen tokens by the penalty and multiply negative logits by it, in place.

    Keskar et al. 2019, "CTRL", section 4.1, extended to negative logits as in Hugging Face transformers.

    Args:
        logits: (rows, vocab_size)
        seen: (rows, vocab_size), not zero at tokens that the text holds already.
    """
    weaker = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen != 0, weaker, logits, out=logits)


def draw(logits: Tensor, seeds: Tensor, numbers: Tensor, sampling: Sampling) -> Tensor:
    """Draw one token per row. The repetition penalty is not applied here.

    >>> logits = torch.tensor([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0]])
    >>> draw(logits, torch.tensor([3, 4]), torch.tensor([0, 0]), Sampling(top_k=2)).tolist()
    [1, 0]

    Args:
        logits: (rows, vocab_size); -inf is never drawn.
        seeds: (rows) int64, seeds of the rows' random streams.
        numbers: (rows) int64, tokens that each row has drawn before.

    Returns:
        (rows) int64; -1 where a logit is +inf or NaN, or all are -inf.
    """
    if sampling.temperature == 0:
        likeliest = logits.argmax(dim=-1, keepdim=True)  # (rows, 1); the first NaN if there is any
        return likeliest.where(logits.gather(1, likeliest).isfinite(), -1)[:, 0]
    highest = logits.amax(dim=-1, keepdim=True)  # (rows, 1); NaN if there is any
    accepted = ~highest[:, 0].isfinite()  # rows whose token is decided
    below = (logits - highest).to(torch.promote_types(logits.dtype, torch.float32))
    scale = 1 / max(sampling.temperature, 1e-30) * math.log2(math.e)
    weights = below.mul_(scale).exp2_().mul_(LARGEST_WEIGHT).long()  # (rows, vocab_size)
    left = weights  # of the tokens that the next draw is from
    drawn = torch.full_like(seeds, -1)
    for attempt in itertools.count():
        cumulative = left.cumsum(dim=-1)
        total = cumulative[:, -1]
        stream = zip(seeds.tolist(), numbers.tolist(), total.tolist(), strict=True)
        targets = [[philox(seed, number, attempt) * weight >> 64] for seed, number, weight in stream]
        found = torch.searchsorted(cumulative, torch.tensor(targets, device=left.device), right=True)
        drawn = drawn.where(accepted, found[:, 0])
        if not sampling.top_k and sampling.top_p >= 1 and not sampling.min_p:
            return drawn
        if attempt == 0:
            limit = total + 1  # a token is in the set of top-p if the likelier tokens weigh less
            if sampling.top_p < 1:
                k = min(sampling.top_k, weights.shape[1])
                mass = weights.topk(k).values.sum(dim=-1) if sampling.top_k else total
                limit = (mass.double() * sampling.top_p).long()
            ids = torch.arange(left.shape[1], device=left.device)
        token = drawn.clamp(min=0)[:, None]
        own = weights.gather(1, token)  # (rows, 1)
        likelier = (weights > own) | ((weights == own) & (ids < token))
        left = weights * likelier
        ahead = left.sum(dim=-1)  # the weight of likelier tokens
        within = (ahead < limit) & (own[:, 0] >= int(sampling.min_p * LARGEST_WEIGHT))
        if sampling.top_k:
            within &= likelier.sum(dim=-1) < sampling.top_k
        accepted |= within | (ahead == 0)
        if accepted.all():
            return drawn
    raise AssertionError("unreachable")


def philox(seed: int, number: int, attempt: int) -> int:
    """Return 64 random bits: the first two words of Philox4x32-10 with the key `seed` and the counter (number,
    attempt, 0, 0) (Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3")."""
    low, high = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    a, b, c, d = number & 0xFFFFFFFF, attempt, 0, 0
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, c = (second >> 32) ^ b ^ low, (first >> 32) ^ d ^ high
        b, d = second & 0xFFFFFFFF, first & 0xFFFFFFFF
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    return a << 32 | b
