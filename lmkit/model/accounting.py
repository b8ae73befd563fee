"""Count the parameters, floating-point operations and bytes of a configuration; name sizes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lmkit.errors import UsageError, did_you_mean
from lmkit.recipe.tables import PRESETS, ModelConfig


def preset_config(name: str, *, vocab_size: int, context_length: int, **changes: Any) -> ModelConfig:
    """Return the configuration of a named size, see `PRESETS`, with further fields of `ModelConfig`.

    >>> preset_config("small", vocab_size=50257, context_length=1024).num_layers
    12

    Raises:
        UsageError: no size has this name.
    """
    if name not in PRESETS:
        message = f"no model size is called {name!r}{did_you_mean(name, PRESETS)}"
        raise UsageError("model.unknown_preset", message, hint="there are: " + ", ".join(PRESETS))
    sizes: dict[str, Any] = {"vocab_size": vocab_size, "context_length": context_length}
    return ModelConfig(**{**PRESETS[name], **sizes, **changes})


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters.

    Attributes:
        total: all of them; a matrix that is both embedding and head counts once.
        multiplying: those by which each token is multiplied: all but a separate input embedding and biases.
        vectors: gains and biases, which are float32 and not decayed.
        in_blocks: elements of the blocks' matrices; `rows`: their rows.
    """

    total: int
    multiplying: int
    vectors: int
    in_blocks: int
    rows: int


@lru_cache(maxsize=64)
def count_parameters(config: ModelConfig) -> ParameterCounts:
    """Count the parameters of `TransformerLM(config)`, whose vocabulary size is set.

    >>> count_parameters(preset_config("small", vocab_size=50257, context_length=1024)).total
    190460160
    """
    from lmkit.core.model import TransformerLM  # imports torch, which the tables of benches do without

    # All blocks have the same parameters; a config.json may ask for a billion of them.
    model = TransformerLM(config.changed(num_layers=1, context_length=1), device="meta")
    total = biases = vectors = in_blocks = rows = 0
    for name, parameter in model.named_parameters():
        in_block = name.startswith("layers.")
        times = config.num_layers if in_block else 1
        count = times * parameter.numel()
        total += count
        biases += count if name.endswith(".bias") else 0
        if parameter.dim() < 2:
            vectors += count
        elif in_block:
            in_blocks += count
            rows += times * len(parameter)
    table = 0 if config.tie_embeddings else model.token_embeddings.weight.numel()
    return ParameterCounts(total, total - table - biases, vectors, in_blocks, rows)


def least_bytes(
    config: ModelConfig, batch_size: int, context: int, element_bytes: int, *, fp8: bool = False
) -> int:
    """Return the bytes that a decode step reads at least: all weights but a separate embedding (`fp8`: matrices with
    a float32 scale for each row), and the keys and values of the `context` tokens before the new one that each layer
    sees."""
    assert config.vocab_size is not None
    parameters = count_parameters(config)
    weights = parameters.total - (0 if config.tie_embeddings else config.vocab_size * config.d_model)
    windows = (config.window(layer) for layer in range(config.num_layers))
    seen = sum(context if window is None else min(context, window - 1) for window in windows)
    cache = 2 * config.kv_heads * config.head_dim * seen * batch_size
    if not fp8:
        return element_bytes * (weights + cache)
    scales = 4 * (parameters.rows + config.vocab_size)
    matrices = weights - parameters.vectors
    return matrices + scales + element_bytes * (parameters.vectors + cache)


def flops_per_token(config: ModelConfig, context: int, *, causal: bool = False) -> int:
    """Return the floating-point operations of one training step per token: 6 N + 12 L d T (Chowdhery et al. 2022,
    "PaLM", appendix B), with N the multiplying parameters, L layers, width d and T = `context` tokens.

    As in the paper, attention counts in full, unless `causal` halves it to 6 L d T, and recomputation does not count.
    """
    return 3 * forward_flops_per_token(config, context, causal=causal)


def forward_flops_per_token(config: ModelConfig, context: int, *, causal: bool = False) -> int:
    """Return the floating-point operations of a forward pass per token: 2 N + 4 L d T; `causal`: 2 N + 2 L d T.

    In a layer with a window, twice the tokens that a token sees on average take the place of T.
    """
    attention = (2 if causal else 4) * config.width_of_heads * _seen(config, context)
    return 2 * count_parameters(config).multiplying + attention


def _seen(config: ModelConfig, context: int) -> int:
    """Return, over all layers, twice the tokens that a token sees on average: L T without windows."""
    windows = (min(config.window(layer) or context, context) for layer in range(config.num_layers))
    return sum(window * (2 * context - window) // context for window in windows)


@dataclass(frozen=True)
class Work:
    """What a step cannot do without: floating-point operations on tensor cores, bytes read and written."""

    flops: int = 0
    num_bytes: int = 0


def update_bytes(element_bytes: int) -> int:
    """Return the least bytes that clipping and AdamW move for each parameter: the gradient, read twice; a float32
    weight and two moments, read and written; a copy of the weight if elements are narrower than float32."""
    copy = element_bytes if element_bytes < 4 else 0
    return 2 * element_bytes + 6 * 4 + copy


def step_work(config: ModelConfig, rows: int, *, element_bytes: int) -> dict[str, Work]:
    """Return class (of `measure.trace`) -> the least work of a training step in that class.

    Attention is causal and computes its scores again in its backward pass. An elementwise operation reads its inputs
    and writes its results once, joined with the additions around it. SwiGLU keeps only its inputs, and the gradient
    of the logits takes their place.

    Args:
        rows: sequences of `config.context_length` tokens.
        element_bytes: of activations and gradients.
    """
    from lmkit.measure import trace as classes

    tokens = rows * config.context_length
    d, layers = config.d_model, config.num_layers
    d_q, d_kv = config.width_of_heads, config.kv_heads * config.head_dim
    counts = count_parameters(config)
    assert config.vocab_size is not None
    attention = 2 * d_q * _seen(config, config.context_length) * tokens
    element = element_bytes * tokens
    return {
        classes.PRODUCTS: Work(flops=6 * (counts.in_blocks + config.vocab_size * d) * tokens),
        classes.ATTENTION_FORWARD: Work(flops=attention),
        classes.ATTENTION_BACKWARD: Work(flops=5 * attention // 2),  # five products, the forward pass has two
        # Forward: two read, one written; backward: three read, two written.
        classes.ACTIVATION: Work(num_bytes=8 * config.d_ff * layers * element),
        # Forward: residual and update read, sum and norm written; backward: sum and two gradients read, one written.
        classes.NORM: Work(num_bytes=8 * (2 * layers + 1) * d * element),
        classes.LOSS: Work(num_bytes=2 * config.vocab_size * element),
        classes.OPTIMIZER: Work(num_bytes=update_bytes(element_bytes) * counts.total),
        # Read and written, forward and backward.
        classes.ROPE: Work(num_bytes=4 * (d_q + d_kv) * layers * element),
        classes.EMBEDDING: Work(num_bytes=4 * d * element),  # likewise
    }
