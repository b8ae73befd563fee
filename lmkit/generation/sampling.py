"""Draw the next token from logits: temperature, top-k, top-p."""

from __future__ import annotations

import torch
from torch import Tensor

from lmkit.recipe.tables import GenerateConfig


def sample(logits: Tensor, uniforms: Tensor, options: GenerateConfig) -> Tensor:
    """Draw one token per row.

    >>> options = GenerateConfig(temperature=1.0, top_k=2)
    >>> sample(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0.9]), options)
    tensor([1])

    Args:
        logits: (batch, vocab_size)
        uniforms: (batch) float32 random numbers from [0, 1); row i depends on number i alone.
        options: `temperature` divides the logits, 0 takes the largest; `top_k` keeps the k most likely tokens, 0
            keeps all; `top_p` keeps the smallest set of the rest whose probability reaches p (nucleus sampling,
            Holtzman et al. 2020, eq. 2-3).

    Returns:
        (batch) int64 token ids.
    """
    if options.temperature == 0:
        return logits.argmax(dim=-1)
    scores = logits.double()
    # Subtract the largest logit before dividing: the quotient cannot overflow upwards.
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / options.temperature  # (batch, vocab_size)
    ids = None
    # top-k
    if 0 < options.top_k < scores.shape[-1]:
        scores, ids = scores.topk(options.top_k)  # (batch, top_k), in falling order
    elif options.top_p < 1:
        scores, ids = scores.sort(descending=True, stable=True)  # (batch, vocab_size)
    p = scores.softmax(dim=-1)
    # top-p: drop a token if the more likely ones reach p without it
    if options.top_p < 1:
        likelier = p.cumsum(dim=-1) - p  # probability of all tokens before this one
        p = p.masked_fill(likelier >= options.top_p, 0.0)
    # Invert the cumulative distribution. A float32 below 1 is at most 1 - 2^-24, so the float64 product stays below
    # the total, and a token of probability 0 is never drawn.
    cumulative = p.cumsum(dim=-1)
    drawn = uniforms.double() * cumulative[:, -1]  # (batch)
    choice = torch.searchsorted(cumulative, drawn.unsqueeze(1), right=True)  # (batch, 1)
    return (choice if ids is None else ids.gather(1, choice)).squeeze(1)
