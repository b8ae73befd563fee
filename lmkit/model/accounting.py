"""How many parameters, floating-point operations and bytes a configuration means. Arithmetic alone: no torch."""

from __future__ import annotations

from dataclasses import dataclass

from lmkit.recipe.model import ModelConfig


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters."""

    total: int
    """All of them; a matrix that is embedding and head at once counts once."""
    multiplying: int
    """Those that each token is multiplied with: all but a separate input embedding, from which rows are only read."""


def count_parameters(config: ModelConfig) -> ParameterCounts:
    """Parameters of `TransformerLM(config)`.

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
    """Floating-point operations of one training step per token: 6 N + 12 L d T (Chowdhery et al. 2022, "PaLM",
    appendix B), with N the multiplying parameters, L layers, width d and T = `context` tokens.

    Forward is a third of it, backward two thirds. As there, attention counts in full although a causal kernel may
    skip half, and recomputation (activation checkpointing) counts nothing: it is the useful work.
    """
    return 3 * forward_flops_per_token(config, context)


def forward_flops_per_token(config: ModelConfig, context: int) -> int:
    """Floating-point operations of a forward pass per token: 2 N + 4 L d T."""
    return 2 * count_parameters(config).multiplying + 4 * config.num_layers * config.d_model * context


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes that live from step to step; activations come on top."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def training_memory(config: ModelConfig) -> TrainingMemory:
    """What float32 weights, their gradients and AdamW's two moments take, in bytes, on one rank."""
    weights = 4 * count_parameters(config).total
    return TrainingMemory(weights=weights, gradients=weights, optimizer=2 * weights)
