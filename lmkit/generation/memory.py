"""What a `Decoder` allocates. It is compared with the free memory before anything is allocated."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from lmkit.core.sampling import Sampling
from lmkit.errors import LmkitError
from lmkit.generation.prefill import TOKENS_AT_ONCE
from lmkit.kernels.decode.rows import MOST_ROWS
from lmkit.measure.memory import available_memory
from lmkit.model.accounting import count_parameters
from lmkit.registry import ATTENTION

if TYPE_CHECKING:
    from lmkit.model.transformer import TransformerLM

LIBRARIES = 500_000_000
"""Bytes that a GPU's libraries take at their first calls, to load kernels and as workspaces (cuBLAS: 32 MiB on every
stream), and that the allocator's rounding costs."""


class Needs(NamedTuple):
    """Bytes: `cache` and `others` of every row, from the first step on, and `once` for all rows."""

    cache: int
    others: int
    once: int


def decoder_needs(
    model: TransformerLM, rows: int, sampling: Sampling, *, kernels: bool, fp8: bool = False
) -> Needs:
    """Count what a decoder with these arguments allocates, with and without the kernels' step."""
    config, weight = model.config, model.lm_head.weight
    vocab_size, width = weight.shape
    element, capacity = weight.element_size(), config.context_length
    cache = 2 * config.num_layers * config.kv_heads * capacity * config.head_dim * element
    state = 8 * (capacity + 1) + 5 * 8 + 4  # `Rows`
    seen = vocab_size if sampling.repetition_penalty != 1 else 0
    qkv = (config.num_heads + 2 * config.kv_heads) * config.head_dim
    hidden = 2 * config.d_ff
    at_once = max(capacity, min(TOKENS_AT_ONCE, rows // 16 * capacity)) if kernels else capacity
    reading = at_once * (hidden + config.d_ff + 8 * width) * element
    once = 2 * vocab_size + reading  # ids that are banned, ids that end a text
    if kernels:
        step = sum(kernel_step_needs(model, rows))
        once += reading  # recorded, in a pool of its own
        once += count_parameters(config).multiplying if fp8 else 0
    else:
        # Logits; weights, sums and what is left of the ids, of which `draw` draws.
        draw = vocab_size * (element + (8 if sampling.temperature == 0 else 40))
        step = draw + (qkv + hidden + config.d_ff + 8 * width) * element
    if not ATTENTION.facts(config.attention).sees_all:
        once += capacity * vocab_size * element  # logits of a text that is read again
    once += LIBRARIES if weight.is_cuda else 0
    return Needs(cache, state + seen + step, once)


def kernel_step_needs(model: TransformerLM, rows: int) -> tuple[int, int]:
    """Return the bytes that a `KernelStep` allocates for each row: when it is made, and when steps are recorded."""
    from lmkit.generation.kernel_step import SMALLEST_BUCKET
    from lmkit.kernels.decode.attention import attend_space
    from lmkit.kernels.decode.products import SLOTS

    config, weight = model.config, model.lm_head.weight
    vocab_size, width = weight.shape
    element, capacity = weight.element_size(), config.context_length
    heads = config.num_heads, config.kv_heads, config.head_dim
    some = min(rows, 2)  # a single row is split in another way
    space = attend_space(some, *heads, capacity, weight.new_empty(0, device="meta"))
    stream = 2 * width * element + 4 * width
    qkv = (config.num_heads + 2 * config.kv_heads) * config.head_dim
    kept = stream + (qkv + width + config.d_ff) * element + 4 * vocab_size + 8 * SLOTS.value
    kept += sum(x.nbytes for x in space) // some
    copies = stream + 8  # while a step is recorded
    if rows <= MOST_ROWS:
        return kept, copies
    # What is alive in `KernelStep._many`, once before it is recorded and in the graph of every bucket.
    alive = (3 * width + max(3 * config.d_ff, 2 * width)) * element
    buckets = 1 + max(0, (capacity - 1).bit_length() - (SMALLEST_BUCKET - 1).bit_length())
    return kept, copies + (1 + buckets) * alive


def check_memory(
    model: TransformerLM, rows: int, sampling: Sampling, *, kernels: bool, fp8: bool = False
) -> None:
    """Raise if the device's free memory has no room for these rows."""
    device = model.lm_head.weight.device
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    elif (available := available_memory()) is not None:
        free = available
    else:
        return
    cache, others, once = decoder_needs(model, rows, sampling, kernels=kernels, fp8=fp8)
    if (needed := once + rows * (cache + others)) > free:
        why = (
            f"{rows} texts need {needed / 1e9:.2f} GB, of it {rows * cache / 1e9:.2f} GB for their KV cache; "
            f"{free / 1e9:.2f} GB are free"
        )
        raise does_not_fit(why, max(0, free - once) // (cache + others))


def does_not_fit(why: str, fits: int) -> LmkitError:
    """Return the error that says which batch fits."""
    hint = (
        f"set generate.batch_size to at most {fits}"
        if fits
        else "use a smaller model, a shorter context (lmkit import --context-length), or more memory"
    )
    return LmkitError("generate.out_of_memory", f"generate.batch_size: {why}", hint=hint)
