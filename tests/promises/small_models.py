"""Small models of this folder, by name."""

from typing import Any

import torch
from torch import nn

from lmkit.model import ModelConfig, TransformerLM

SIZES = {"vocab_size": 31, "context_length": 16, "d_model": 16, "d_ff": 24, "num_layers": 2, "num_heads": 4}
SWITCHES = {
    "attention_window": 4,
    "separate_documents": True,
    "qk_norm": True,
    "qkv_bias": True,
    "num_kv_heads": 2,
}
FIELDS: dict[str, dict[str, Any]] = {
    "sdpa": {},
    "switches": {**SWITCHES, "tie_embeddings": True},
    "flash_torch": {"attention": "flash_torch"},
    "vectorized": {"attention": "vectorized"},
    "checkpointed": {"activation_checkpointing": "block"},
}


def make(name: str, kind: type[nn.Module] = TransformerLM) -> nn.Module:
    torch.manual_seed(0)
    return kind(ModelConfig(**{**SIZES, **FIELDS[name]}), dtype=torch.float64)
