"""How a decode step samples tokens, by PyTorch operations: the form to read, and the form for CPUs. Needs no Triton.

It defines what the kernels share with it: the state of the rows, the rules and the settings.
"""

from __future__ import annotations

import itertools
import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Kind = Literal["greedy", "all", "set", "nested"]

MOST_ROWS = 16  # rows that the kernels' own products multiply; a library multiplies more


class Sampling(NamedTuple):
    """How tokens are drawn.

    Attributes:
        temperature: divides the logits; 0 takes the largest.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of these whose probability reaches p (Holtzman et al. 2020, eq. 2-3).
        min_p: drop tokens less likely than this times the likeliest (Nguyen et al. 2024, "min-p").
        repetition_penalty: see `plain_rules`.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def kind(self) -> Kind:
        """The kind of kernel: sampling from a set, or from a set within a set, takes longer."""
        if self.temperature == 0:
            return "greedy"
        if self.top_k and self.top_p < 1:
            return "nested"
        return "set" if self.top_k or self.top_p < 1 or self.min_p else "all"

    def settings(self, device: torch.device | str | None = None) -> Tensor:
        """Return the kernels' settings (5,) float64: 1 / temperature, top_k, top_p, min_p, repetition_penalty."""
        scale = 1 / max(self.temperature, 1e-30)  # finite times a logit in float32
        top_k = self.top_k or 1 << 40
        values = (scale, top_k, self.top_p, self.min_p, self.repetition_penalty)
        return torch.tensor(values, dtype=torch.float64, device=device)


class Rows(NamedTuple):
    """The rows of a batch, on the device; a step changes all but `seeds`.

    Attributes:
        place: (rows) int64, the position of the token that the next step reads.
        text: (rows, capacity + 1) int64, the tokens at positions 0 ... place.
        number: (rows) int64, tokens drawn so far.
        done: (rows) int64; a step does not change rows where it is not zero.
        seeds: (rows) int64, seeds of the random streams.
        drawn: (rows) int64, the newest token; -1: the logits were not finite.
        logprobs: (rows) float32, the natural logarithm of the newest token's probability at temperature 1.
    """

    place: Tensor
    text: Tensor
    number: Tensor
    done: Tensor
    seeds: Tensor
    drawn: Tensor
    logprobs: Tensor


class Rules(NamedTuple):
    """Rules for ids: which change logits before sampling, and which end a row.

    Attributes:
        banned: (vocab_size) int8, not zero at ids that are never drawn.
        seen: (rows, vocab_size) int8, not zero at ids that a row holds already.
        settings: see `Sampling.settings`; the rules read only the penalty.
        penalizes: whether there is a repetition penalty; if not, `seen` is not read.
        stop: the id that ends a row; -1: none, or `stops` has them.
        stops: (vocab_size) int8, not zero at ids that end a row; None: there is one at most, which costs no memory
            access.
    """

    banned: Tensor
    seen: Tensor
    settings: Tensor
    penalizes: bool
    stop: int = -1
    stops: Tensor | None = None


def plain_rules(logits: Tensor, rules: Rules) -> Tensor:
    """Apply the rules to logits (rows, vocab_size), in place.

    The repetition penalty divides positive logits of ids that the row holds, and multiplies negative logits
    (Keskar et al. 2019, "CTRL", section 4.1, extended to negative logits as in Hugging Face transformers).
    """
    if rules.penalizes:
        penalty = rules.settings[-1].to(logits.dtype)
        weaker = torch.where(logits > 0, logits / penalty, logits * penalty)
        torch.where(rules.seen != 0, weaker, logits, out=logits)
    return logits.masked_fill_(rules.banned != 0, -torch.inf)


def plain_draw(logits: Tensor, seeds: Tensor, numbers: Tensor, sampling: Sampling) -> Tensor:
    """Draw one token per row by PyTorch operations: the form to read, and the form for CPUs.

    >>> logits = torch.tensor([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0]])
    >>> plain_draw(logits, torch.tensor([3, 4]), torch.tensor([0, 0]), Sampling(top_k=2)).tolist()
    [1, 0]

    Args:
        logits: (rows, vocab_size); -inf is never drawn.
        seeds: (rows) int64, seeds of the rows' random streams.
        numbers: (rows) int64, tokens that each row has drawn before.

    Returns:
        (rows) int64; -1 where no logit is finite or one is infinite or NaN.
    """
    highest = logits.amax(dim=-1, keepdim=True)  # (rows, 1); NaN if there is any
    finite = highest[:, 0].isfinite()
    if sampling.temperature == 0:
        return logits.argmax(dim=-1).masked_fill_(~finite, -1)
    scale, top_k, top_p, min_p, _ = sampling.settings().tolist()
    below = (logits - highest).to(torch.promote_types(logits.dtype, torch.float32))
    weights = (torch.exp2(below * (scale * math.log2(math.e))) * 2.0**40).long()  # (rows, vocab_size)
    left = weights  # of the tokens that the next draw is from
    accepted = ~finite
    drawn = torch.full_like(seeds, -1)
    for attempt in itertools.count():
        cumulative = left.cumsum(dim=-1)
        total = cumulative[:, -1]
        stream = zip(seeds.tolist(), numbers.tolist(), total.tolist(), strict=True)
        targets = [[philox(seed, number, attempt) * weight >> 64] for seed, number, weight in stream]
        found = torch.searchsorted(
            cumulative, torch.tensor(targets, device=left.device), right=True
        )  # (rows, 1)
        drawn = drawn.where(accepted, found[:, 0])
        if sampling.kind == "all":
            return drawn
        if attempt == 0:
            limit = total
            if sampling.kind == "nested":
                limit = weights.topk(min(sampling.top_k, weights.shape[1])).values.sum(dim=-1)
            limit = (limit.double() * top_p).long() if top_p < 1 else limit + 1
            ids = torch.arange(left.shape[1], device=left.device)
        token = drawn.clamp(min=0)[:, None]
        own = weights.gather(1, token)  # (rows, 1)
        likelier = (weights > own) | ((weights == own) & (ids < token))
        left = weights * likelier
        ahead = left.sum(dim=-1)  # the weight of likelier tokens
        within = (ahead < limit) & (likelier.sum(dim=-1) < top_k) & (own[:, 0] >= int(min_p * 2**40))
        accepted |= within | (ahead == 0)
        if accepted.all():
            return drawn
    raise AssertionError("unreachable")


def philox(seed: int, number: int, attempt: int) -> int:
    """Return 64 random bits: the first two words of Philox4x32-10 with the key `seed` and the counter (number,
    attempt, 0, 0)."""
    low, high = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    a, b, c, d = number & 0xFFFFFFFF, attempt, 0, 0
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, c = (second >> 32) ^ b ^ low, (first >> 32) ^ d ^ high
        b, d = second & 0xFFFFFFFF, first & 0xFFFFFFFF
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    return a << 32 | b


def plain_advance(
    logits: Tensor, rows: Rows, sampling: Sampling, rules: Rules, *, most: int, logprobs: bool
) -> None:
    """Draw the next token of every row that is not done and update `rows`, by PyTorch operations.

    Args:
        logits: (rows, vocab_size), with the rules applied.
        most: drawn tokens that end a row.
    """
    tokens = plain_draw(logits, rows.seeds, rows.number, sampling)
    live = rows.done == 0
    if logprobs:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        chosen = wide.gather(1, tokens.clamp(min=0)[:, None])[:, 0] - wide.logsumexp(dim=-1)
        torch.where(live, chosen.to(rows.logprobs.dtype), rows.logprobs, out=rows.logprobs)
    torch.where(live, tokens, rows.drawn, out=rows.drawn)
    token = rows.drawn.clamp(min=0)[:, None]
    next_place = (rows.place + live)[:, None]
    rows.text.scatter_(1, next_place, torch.where(live[:, None], token, rows.text.gather(1, next_place)))
    if rules.penalizes:
        rules.seen.scatter_(1, token, 1)
    rows.number.add_(live)
    stops = tokens == rules.stop if rules.stops is None else rules.stops[token[:, 0]] != 0
    ending = (rows.drawn < 0) | stops | (rows.number >= most)
    rows.done.logical_or_(ending)
    rows.place.add_(rows.done == 0)
