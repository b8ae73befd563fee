"""Small models whose every weight is random, gains included."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lmkit.model.transformer import TransformerLM
from lmkit.recipe.tables import ModelConfig

SIZES = {"vocab_size": 61, "context_length": 24, "d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4}


@pytest.fixture
def make_model() -> Callable[..., TransformerLM]:
    """make_model(**fields) -> a model of 2 layers, float64 unless `dtype` says otherwise."""

    def make(*, dtype: torch.dtype = torch.float64, seed: int = 0, **fields: Any) -> TransformerLM:
        torch.manual_seed(seed)
        model = TransformerLM(ModelConfig(**{**SIZES, "attention": "reference", **fields}), dtype=dtype)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if any(part in name for part in ("ln", "bias", "norm")):
                    parameter.add_(torch.randn_like(parameter) * 0.3)
        return model

    return make
