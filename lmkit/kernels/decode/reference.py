"""The decode step by PyTorch operations: the form to read, and the form for CPUs. Needs no Triton.

It defines what the kernels share with it: the state of the rows, and how tokens are sampled.
"""

from __future__ import annotations

import itertools
import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

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


class Ends(NamedTuple):
    """Conditions that end a row: the token `stop` (-1: none), or `most` drawn tokens."""

    stop: int
    most: int


class Rules(NamedTuple):
    """Rules that change logits before sampling.

    Attributes:
        banned: (vocab_size) int8, not zero at ids that are never drawn.
        seen: (rows, vocab_size) int8, not zero at ids that a row holds already.
        settings: see `Sampling.settings`; the rules read only the penalty.
        penalizes: whether there is a repetition penalty; if not, `seen` is not read.
    """

    banned: Tensor
    seen: Tensor
    settings: Tensor
    penalizes: bool


def plain_norm(x: Tensor, gain: Tensor, *, eps: float) -> Tensor:
    """RMSNorm, x / sqrt(mean(x^2) + eps) * gain, of each row of x (Zhang and Sennrich 2019, eq. 4)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    return (x * (norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()) * gain).to(x.dtype)


def plain_swiglu(joint: Tensor) -> Tensor:
    """silu(gate) * up of the joined projection, (rows, 2 d_ff) -> (rows, d_ff)."""
    gate, up = joint.chunk(2, dim=-1)
    return F.silu(gate) * up


class Position(NamedTuple):
    """Positions of the rows in a step, the same for all layers.

    Attributes:
        place: (rows) int64, the position of each row's token.
        longest: how many keys the longest row sees.
        hidden: (rows, 1, 1, longest), -inf at keys that a row must not see, else 0; None if rows have one length.
        cos_sin: (rows, 1, head_dim / 2) complex, cos + i sin of the rotation angles.
    """

    place: Tensor
    longest: int
    hidden: Tensor | None
    cos_sin: Tensor


def position_of(place: Tensor, cos_sin: Tensor, dtype: torch.dtype) -> Position:
    """Return the position for a step.

    Args:
        cos_sin: (capacity, head_dim / 2, 2), cos and sin of every position.
        dtype: of queries and keys.
    """
    longest = int(place.max()) + 1
    turn = torch.view_as_complex(cos_sin[place].to(torch.promote_types(dtype, torch.float32)))
    if len(place) == 1:
        return Position(place, longest, None, turn[:, None])
    beyond = torch.arange(longest, device=place.device) > place[:, None]
    hidden = torch.zeros(beyond.shape, device=place.device, dtype=dtype).masked_fill_(beyond, -math.inf)
    return Position(place, longest, hidden[:, None, None], turn[:, None])


def plain_attend(qkv: Tensor, keys: Tensor, values: Tensor, at: Position) -> Tensor:
    """Rotate q and k, store k and v, attend to all keys up to the row's place.

    Args:
        qkv: (rows, (heads + 2 kv_heads) * head_dim), not yet rotated.
        keys, values: (rows, kv_heads, capacity, head_dim), the cache.

    Returns:
        (rows, heads * head_dim)
    """
    rows, kv_heads, _, head_dim = keys.shape
    heads = qkv.unflatten(-1, (-1, head_dim))  # (rows, heads + 2 kv_heads, head_dim)
    pairs = heads[:, :-kv_heads].to(at.cos_sin.dtype.to_real()).unflatten(-1, (-1, 2))
    # A rotation of the plane is a complex product.
    turned = torch.view_as_real(torch.view_as_complex(pairs) * at.cos_sin).flatten(-2).to(keys.dtype)
    row = torch.arange(rows, device=keys.device)
    keys[row, :, at.place] = turned[:, -kv_heads:]
    values[row, :, at.place] = heads[:, -kv_heads:].to(values.dtype)
    q = turned[:, :-kv_heads, None]  # (rows, heads, 1, head_dim)
    keys, values = keys[:, :, : at.longest], values[:, :, : at.longest]
    grouped = q.shape[1] != kv_heads
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=at.hidden, enable_gqa=grouped)
    return out.flatten(1).to(qkv.dtype)


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
    logits: Tensor, rows: Rows, sampling: Sampling, rules: Rules, ends: Ends, *, logprobs: bool
) -> None:
    """Draw the next token of every row that is not done and update `rows`, by PyTorch operations.

    Args:
        logits: (rows, vocab_size), with the rules applied.
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
    ending = (rows.drawn < 0) | (rows.drawn == ends.stop) | (rows.number >= ends.most)
    rows.done.logical_or_(ending)
    rows.place.add_(rows.done == 0)
