"""Count the parameters, floating-point operations and bytes of a configuration; name sizes. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lmkit.errors import UsageError, did_you_mean
from lmkit.measure import kernel_classes as classes
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
            looked up, and biases, which are added.
        vectors: gains and biases, which are float32 and not decayed.
    """

    total: int
    multiplying: int
    vectors: int


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
    others = (d + 2 * d_kv) * config.qkv_bias + 2 * config.head_dim * config.qk_norm
    others *= config.num_layers
    tables = 0 if config.tie_embeddings else head
    return ParameterCounts(
        total=multiplying + others + tables,
        multiplying=multiplying,
        vectors=config.num_layers * norms + d + others,
    )


def least_bytes(
    config: ModelConfig, batch_size: int, context: int, element_bytes: int, *, fp8: bool = False
) -> int:
    """Return the bytes that a decode step reads at least: all weights but the embedding, and the filled cache.

    Args:
        fp8: matrices are fp8, with a float32 scale for each row.
    """
    assert config.vocab_size is not None
    parameters = count_parameters(config)
    cache = 2 * config.num_layers * config.kv_heads * config.head_dim * context * batch_size
    if not fp8:
        return element_bytes * (parameters.multiplying + cache)
    rows = 2 * config.d_model + (config.num_heads + 2 * config.kv_heads) * config.head_dim + 2 * config.d_ff
    scales = 4 * (config.num_layers * rows + config.vocab_size)
    matrices = parameters.multiplying - parameters.vectors
    return matrices + scales + element_bytes * (parameters.vectors + cache)


def flops_per_token(config: ModelConfig, context: int, *, causal: bool = False) -> int:
    """Return the floating-point operations of one training step per token: 6 N + 12 L d T (Chowdhery et al. 2022,
    "PaLM", appendix B), with N the multiplying parameters, L layers, width d and T = `context` tokens.

    A third of them is the forward pass. As in the paper, attention counts in full although a causal kernel may skip
    half of it, and recomputation (activation checkpointing) does not count.

    Args:
        causal: count only the half of attention that a causal kernel needs: 6 N + 6 L d T.
    """
    return 3 * forward_flops_per_token(config, context, causal=causal)


def forward_flops_per_token(config: ModelConfig, context: int, *, causal: bool = False) -> int:
    """Return the floating-point operations of a forward pass per token: 2 N + 4 L d T; `causal`: 2 N + 2 L d T.

    In a layer with a window, twice the tokens that a token sees on average take the place of T.
    """
    attention = (2 if causal else 4) * config.d_model * _seen(config, context)
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
    """Return the least bytes that clipping and AdamW move for each parameter.

    Clipping reads the gradient; AdamW reads it again, reads and writes a float32 weight and two moments, and writes a
    copy of the weight where elements are narrower than float32.
    """
    copy = element_bytes if element_bytes < 4 else 0
    return 2 * element_bytes + 6 * 4 + copy


def step_work(config: ModelConfig, rows: int, *, element_bytes: int) -> dict[str, Work]:
    """Return class (of `measure.kernel_classes`) -> the least work of a training step in that class.

    Attention is causal, keeps no scores and computes them again in its backward pass. An elementwise operation reads
    its inputs and writes its results once, joined with the additions around it. SwiGLU keeps only its inputs, and
    the gradient of the logits takes their place.

    Args:
        rows: sequences of `config.context_length` tokens.
        element_bytes: of activations and gradients.
    """
    tokens = rows * config.context_length
    d, layers = config.d_model, config.num_layers
    d_kv = config.kv_heads * config.head_dim
    counts = count_parameters(config)
    assert config.vocab_size is not None
    gains = (2 * layers + 1) * d
    attention = 2 * d * _seen(config, config.context_length) * tokens
    element = element_bytes * tokens
    return {
        classes.PRODUCTS: Work(flops=6 * (counts.multiplying - gains) * tokens),
        classes.ATTENTION_FORWARD: Work(flops=attention),
        classes.ATTENTION_BACKWARD: Work(flops=5 * attention // 2),  # five products, the forward pass has two
        # Forward: two read, one written; backward: three read, two written.
        classes.ACTIVATION: Work(num_bytes=8 * config.d_ff * layers * element),
        # Forward: residual and update read, sum and norm written; backward: sum and two gradients read, one written.
        # Of heads alone: read, written; input and gradient read, one written.
        classes.NORM: Work(num_bytes=(8 * gains + 5 * (d + d_kv) * layers * config.qk_norm) * element),
        classes.LOSS: Work(num_bytes=2 * config.vocab_size * element),
        classes.OPTIMIZER: Work(num_bytes=update_bytes(element_bytes) * counts.total),
        # Read and written, forward and backward.
        classes.ROPE: Work(num_bytes=4 * (d + d_kv) * layers * element),
        classes.EMBEDDING: Work(num_bytes=4 * d * element),  # likewise
    }


FP8_PRODUCTS = "fp8 products"
"""A class of `step_work` beside those of `measure.kernel_classes`, in which they are matrix products."""
FP8_LEAST_WIDTH = 1024
"""Of both sides of a matrix whose products are computed in fp8: the casts of narrower ones take as long as their
products save."""
FP8_MULTIPLE = 16
"""Both sides have to be multiples of it, as cuBLAS wants."""


def suits_fp8(rows: int, columns: int) -> bool:
    """Return whether fp8 is faster for the products of a matrix, and possible."""
    return min(rows, columns) >= FP8_LEAST_WIDTH and not (rows % FP8_MULTIPLE or columns % FP8_MULTIPLE)


def with_fp8(config: ModelConfig, work: Mapping[str, Work], tokens: int, passes: int) -> dict[str, Work]:
    """Return the work of a step whose large matrices are multiplied in fp8, but for their gradients.

    Args:
        work: the same in bf16, as of `step_work`.
        tokens: of the step.
        passes: micro-batches; each casts the weights anew.
    """
    d, d_kv = config.d_model, config.kv_heads * config.head_dim
    matrices = ((d + 2 * d_kv, d), (d, d), (2 * config.d_ff, d), (d, config.d_ff))
    chosen = [shape for shape in matrices if suits_fp8(*shape)]
    flops = config.num_layers * tokens * sum(4 * rows * columns for rows, columns in chosen)
    # Read 2 bytes and write 1: inputs and gradients of outputs once, weights as they are and transposed.
    cast = sum(tokens * (rows + columns) + 2 * passes * rows * columns for rows, columns in chosen)
    rest = Work(work[classes.PRODUCTS].flops - flops)
    more = {
        FP8_PRODUCTS: Work(flops=flops),
        classes.CASTS: Work(num_bytes=3 * config.num_layers * cast),
    }
    return {**work, classes.PRODUCTS: rest, **more} if chosen else dict(work)


def recomputed_work(
    config: ModelConfig, keeps: Iterable[str], rows: int, *, element_bytes: int
) -> dict[str, Work]:
    """Return class -> what the backward pass computes again; see `lmkit.model.memory.Keep`.

    Args:
        keeps: what each block keeps.
        rows, element_bytes: as of `step_work`.
    """
    d, d_kv = config.d_model, config.kv_heads * config.head_dim
    tokens, layers = rows * config.context_length, config.num_layers
    step = step_work(config, rows, element_bytes=element_bytes)
    project = 2 * tokens * d * (d + 2 * d_kv)
    # After attention; the last product of a block is never repeated.
    expand = 2 * tokens * d * (d + 2 * config.d_ff)
    products = {"input": project + expand, "attention": project + expand, "qkv": expand}
    sums = dict.fromkeys(step, 0)
    for keep in keeps:
        if keep == "all":
            continue
        sums[classes.PRODUCTS] += products.get(keep, 0)
        sums[classes.ATTENTION_FORWARD] += (
            step[classes.ATTENTION_FORWARD].flops // layers if keep == "input" else 0
        )
        sums[classes.ROPE] += (
            step[classes.ROPE].num_bytes // layers // 2 if products.get(keep) != expand else 0
        )
        sums[classes.NORM] += step[classes.NORM].num_bytes // layers // 2
        sums[classes.ACTIVATION] += 3 * step[classes.ACTIVATION].num_bytes // layers // 8
    return {
        name: Work(flops=found) if step[name].flops else Work(num_bytes=found)
        for name, found in sums.items()
        if found
    }


ORTHOGONALIZING = "orthogonalization"
"""A class of kernels of Muon, beside those of `measure.kernel_classes`."""


def orthogonalization_work(config: ModelConfig, iterations: int) -> Work:
    """Return what Muon does to the matrices of the blocks: two products of each Gram matrix, s x s, with the matrix,
    s x l, and one with itself, in every iteration."""
    d, d_kv, d_ff = config.d_model, config.kv_heads * config.head_dim, config.d_ff
    maps = [(d, d), (d, d), (d_kv, d), (d_kv, d), *[(d_ff, d)] * 3]
    sides = [(min(shape), max(shape)) for shape in maps]
    flops = sum(4 * short * short * long + 2 * short**3 for short, long in sides)
    return Work(flops=config.num_layers * iterations * flops)


REACHED = {
    ORTHOGONALIZING: 0.35,
    classes.PRODUCTS: 0.70,
    FP8_PRODUCTS: 0.746,
    classes.CASTS: 0.83,
    classes.ACTIVATION: 0.88,
    classes.NORM: 0.79,
    classes.LOSS: 0.75,
    classes.OPTIMIZER: 0.81,
    classes.ROPE: 0.85,
    classes.EMBEDDING: 0.41,
}
"""Class -> the share of the data sheet's FLOP/s or bytes/s that its kernels reach in a step (fused operations, bf16,
one H200: `artifacts/h200/step`)."""
_REACHED_BY_ATTENTION = {
    classes.ATTENTION_FORWARD: (0.40, 0.615, 370),
    classes.ATTENTION_BACKWARD: (0.50, 0.58, 1150),
}
"""The same for `flash_triton`: heads of up to 64, wider heads; tokens at which half of it is reached."""
_KERNEL_S = 3.2e-6
"""Seconds that a kernel takes at least, as a graph launches it."""
_COLLECTIVE_S = 17e-6
_RANKS_S = 0.2e-3
"""The same for a layer's or a bucket's collective between two H200s, and for the small ones of a step with what they
decide."""
_KERNELS_OF_A_BLOCK = 32
_KERNELS_OF_MATRICES = 48
"""Kernels of a block's passes and its part of the update, and those with which Muon orthogonalizes its matrices.

They and the seconds of ranks were fitted to 38 steps (`artifacts/h200/fsdp`)."""
_HOST_S = {"alone": (3.2e-3, 1.24e-3), "whole": (5.0e-3, 2.0e-3), "gathered": (2.6e-3, 3.05e-3)}
"""(seconds a step, seconds a block) in which the host of an H200 launches kernels without a
graph: of one rank, of several that hold whole weights, of several that gather weights."""
_HOST_S_OF_MATRICES = {"alone": (0.0, 1.39e-3), "whole": (2.5e-3, 0.5e-3), "gathered": (8.0e-3, 0.3e-3)}
"""What Muon adds to them."""


def reached(config: ModelConfig, name: str) -> float:
    """Return the share of its limit that a class of kernels reaches."""
    if name not in _REACHED_BY_ATTENTION:
        return REACHED[name]
    narrow, wide, half = _REACHED_BY_ATTENTION[name]
    most = narrow if config.head_dim <= 64 else wide
    return most * config.context_length / (config.context_length + half)


def seconds_at_limits(name: str, part: Work, *, flops_per_s: float, bytes_per_s: float) -> float:
    """Return the least seconds of a class of kernels: tensor cores multiply fp8 at twice the rate of bf16."""
    rate = flops_per_s * (2 if name == FP8_PRODUCTS else 1)
    return max(part.flops / rate, part.num_bytes / bytes_per_s)


def busy_seconds(
    config: ModelConfig, work: Mapping[str, Work], *, flops_per_s: float, bytes_per_s: float
) -> float:
    """Predict the seconds of a step's work on one GPU: each class at the share of the limits that it reaches.

    Args:
        work: class -> what the step does, see `step_work`.
        flops_per_s, bytes_per_s: the limits, by the data sheet.
    """
    return sum(
        seconds_at_limits(name, part, flops_per_s=flops_per_s, bytes_per_s=bytes_per_s)
        / reached(config, name)
        for name, part in work.items()
    )


def latency_seconds(
    config: ModelConfig, *, micro_batches: int, orthogonalizes: float, collectives: int
) -> float:
    """Predict the seconds that a step's kernels take before and after their work, in a CUDA graph on one GPU.

    Args:
        micro_batches: into which the step is divided.
        orthogonalizes: the share of the blocks' matrices that the optimizer orthogonalizes on this rank.
        collectives: of layers or buckets; with one rank 0.
    """
    kernels = micro_batches * _KERNELS_OF_A_BLOCK + _KERNELS_OF_MATRICES * orthogonalizes
    among_ranks = _RANKS_S + _COLLECTIVE_S * collectives if collectives else 0.0
    return _KERNEL_S * kernels * (config.num_layers + 1) + among_ranks


def host_seconds(
    config: ModelConfig,
    *,
    weights: Literal["alone", "whole", "gathered"],
    micro_batches: int,
    compiled: bool,
    orthogonalizes: bool,
) -> float:
    """Predict the seconds in which the host launches a step kernel by kernel: a step takes at least as long.

    Args:
        weights: "alone" for one rank; "gathered" where several ranks share them.
        compiled: whether the blocks are compiled; they then launch about half as many kernels.
        orthogonalizes: whether the optimizer orthogonalizes the matrices of the blocks.
    """
    of_step, of_block = _HOST_S[weights]
    if compiled:
        of_block -= _HOST_S["alone"][1] / 2
    seconds = of_step + config.num_layers * of_block * micro_batches
    if orthogonalizes:
        of_step, of_block = _HOST_S_OF_MATRICES[weights]
        seconds += of_step + config.num_layers * of_block
    return seconds
