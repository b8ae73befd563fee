"""A text written without a cache, and a model to write it: the model reads it again as a whole for each token."""

from collections.abc import Sequence
from typing import Any

import torch

from lmkit.core.sampling import Sampling, draw, penalize
from lmkit.model.transformer import TransformerLM
from lmkit.recipe.tables import ModelConfig

SIZES = {"vocab_size": 260, "context_length": 16, "d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4}


def opinionated_model(**fields: Any) -> TransformerLM:
    """float64, two layers, context of 16, opinionated enough for its guesses to differ."""
    torch.manual_seed(0)
    config = ModelConfig(**{**SIZES, "attention": "vectorized", **fields})
    model = TransformerLM(config, dtype=torch.float64)
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
        for layer in model.layers:
            layer.attn.output_proj.weight.mul_(3)
    return model


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
