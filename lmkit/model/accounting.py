"""Count the parameters, floating-point operations and bytes of a configuration; name sizes. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lmkit.errors import UsageError, did_you_mean
from lmkit.recipe.tables import PRESETS, ModelConfig


def preset_config(name: str, *, vocab_size: int, context_length: int, **changes: Any) -> ModelConfig:
    """Return the configuration of a named size, see `PRESETS`.

    >>> preset_config("small", vocab_size=50257, context_length=1024).num_layers
    12

    Args:
        changes: further fields of `ModelConfig`.

    Raises:
        UsageError: no size has this name.
    """
    if name not in PRESETS:
        raise UsageError(
            "model.unknown_preset",
            f"no model size is called {name!r}{did_you_mean(name, PRESETS)}",
            hint="there are: " + ", ".join(PRESETS),
        )
    sizes: dict[str, Any] = {"vocab_size": vocab_size, "context_length": context_length}
    return ModelConfig(**{**PRESETS[name], **sizes, **changes})


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters.

    Attributes:
        total: all of them; a matrix that is both embedding and head counts once.
        multiplying: those by which each token is multiplied: all but a separate input embedding, which is only
            looked up.
    """

    total: int
    multiplying: int


def count_parameters(config: ModelConfig) -> ParameterCounts:
    """Count the parameters of `TransformerLM(config)`.

    >>> count_parameters(preset_config("small", vocab_size=50257, context_length=1024)).total
    190460160

    Raises:
        ValueError: the configuration has no vocabulary size.
    """
    if config.vocab_size is None:
        raise ValueError("vocab_size is not set: the tokenizer decides it")
    d = config.d_model
    d_kv = config.kv_heads * config.head_dim
    attention = 2 * d * d + 2 * d * d_kv  # q and output, k and v
    feed_forward = 3 * d * config.d_ff  # w1, w2, w3
    norms = 2 * d
    head = config.vocab_size * d
    multiplying = config.num_layers * (attention + feed_forward + norms) + d + head
    return ParameterCounts(
        total=multiplying if config.tie_embeddings else multiplying + head, multiplying=multiplying
    )


def flops_per_token(config: ModelConfig, context: int) -> int:
    """Return the floating-point operations of one training step per token: 6 N + 12 L d T (Chowdhery et al. 2022,
    "PaLM", appendix B), with N the multiplying parameters, L layers, width d and T = `context` tokens.

    A third of them is the forward pass. As in the paper, attention counts in full although a causal kernel may skip
    half of it, and recomputation (activation checkpointing) does not count.
    """
    return 3 * forward_flops_per_token(config, context)


def forward_flops_per_token(config: ModelConfig, context: int) -> int:
    """Return the floating-point operations of a forward pass per token: 2 N + 4 L d T."""
    return 2 * count_parameters(config).multiplying + 4 * config.num_layers * config.d_model * context


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes that are held from step to step; activations need more."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def training_memory(config: ModelConfig) -> TrainingMemory:
    """Return the bytes of float32 weights, their gradients and AdamW's two moments, on one rank."""
    weights = 4 * count_parameters(config).total
    return TrainingMemory(weights=weights, gradients=weights, optimizer=2 * weights)
