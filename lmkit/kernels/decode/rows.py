"""The rows of a batch and the rules of drawing, as the kernels read them; how a step ends, by PyTorch operations.

`lmkit.core.sampling` is the form to read of how a token is drawn. Needs no Triton.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lmkit.core.sampling import Sampling, penalize

Kind = Literal["greedy", "all", "set", "nested"]

MOST_ROWS = 16  # rows that the kernels' own products multiply; a library multiplies more


def kind_of(sampling: Sampling) -> Kind:
    """Return the kind of kernel: sampling from a set, or from a set within a set, takes longer."""
    if sampling.temperature == 0:
        return "greedy"
    if sampling.top_k and sampling.top_p < 1:
        return "nested"
    return "set" if sampling.top_k or sampling.top_p < 1 or sampling.min_p else "all"


def settings_of(sampling: Sampling, device: torch.device | str | None = None) -> Tensor:
    """Return the kernels' settings (5,) float64: 1 / temperature, top_k, top_p, min_p, repetition_penalty."""
    scale = 1 / max(sampling.temperature, 1e-30)  # finite times a logit in float32
    values = (scale, sampling.top_k or 1 << 40, *sampling[2:])
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
        settings: see `settings_of`; the rules read only the penalty.
        penalizes: whether there is a repetition penalty; if not, `seen` is not read.
        stop: the id that ends a row; -1: none, or `stops` has them.
        stops: (vocab_size) int8, not zero at ids that end a row; None: there is one at most, without memory access.
    """

    banned: Tensor
    seen: Tensor
    settings: Tensor
    penalizes: bool
    stop: int = -1
    stops: Tensor | None = None


def plain_rules(logits: Tensor, rules: Rules) -> Tensor:
    """Apply the rules to logits (rows, vocab_size), in place."""
    if rules.penalizes:
        penalize(logits, rules.seen, rules.settings[-1].to(logits.dtype))
    return logits.masked_fill_(rules.banned.view(torch.bool), -torch.inf)


def log_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the natural logarithm of the probability of tokens (rows), of logits (rows, vocab_size)."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide.gather(1, tokens.clamp(min=0)[:, None])[:, 0] - wide.logsumexp(dim=-1)


def plain_advance(tokens: Any, rows: Rows, rules: Rules, most: int, logprobs: Any = None) -> None:
    """Add a token to every row that is not done and update `rows`. All arguments are tensors, or all NumPy's arrays.

    tokens: (rows) int64, of `draw`; most: drawn tokens that end a row; logprobs: (rows), of `log_probabilities`.
    """
    place, text, number, done, _, drawn, kept = rows
    live = done == 0
    drawn[live] = tokens[live]
    if logprobs is not None:
        kept[live] = logprobs[live]
    known = drawn.clip(0)
    text[live, place[live] + 1] = known[live]
    if rules.penalizes:
        rules.seen[live, known[live]] = 1
    number += live
    stops = tokens == rules.stop if rules.stops is None else rules.stops[known] != 0
    done |= live & ((tokens < 0) | stops | (number >= most))
    place += live & (done == 0)
