"""A text written without a cache: the model reads it again as a whole for each token."""

from collections.abc import Sequence

import torch

from lmkit.core.sampling import Sampling, draw, penalize
from lmkit.model.transformer import TransformerLM


def plain_text(
    model: TransformerLM, prompt: Sequence[int], new: int, sampling: Sampling, seed: int
) -> list[int]:
    """Return what follows the prompt; beyond the context, the text continues from its last half."""
    context, text, first = model.config.context_length, list(prompt), 0
    for number in range(new):
        if len(text) - first > context:
            first = len(text) - max(1, context // 2)
        with torch.no_grad():
            logits = model(torch.tensor([text[first:]]))[:, -1]
        seen = torch.zeros_like(logits).index_fill_(1, torch.tensor(text), 1)
        logits = penalize(logits, seen, sampling.repetition_penalty)
        text.append(draw(logits, torch.tensor([seed]), torch.tensor([number]), sampling).item())
    return text[len(prompt) :]
