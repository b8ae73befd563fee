"""Count the bytes of a training step from its configuration alone.

`saved` lists the activations that a block keeps for its backward pass; `step_memory` adds up what is alive at the
moments at which most may be. Bytes are those of tensors; an allocator, the CUDA context and libraries take more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any, Literal, get_args

import torch

from lmkit.core.model import TransformerBlock
from lmkit.model.accounting import count_parameters
from lmkit.recipe.tables import ModelConfig
from lmkit.registry import ATTENTION

FLOAT = 4  # bytes of a float32
COUNT = 8  # bytes of the number of targets
GB = 10**9
MIB = 2**20
SWITCHES = frozenset({"qkv_bias", "qk_norm", "attention_window"})
"""The switches of [model] that blocks of fused operations implement, and the fast steps of generation. With others,
the blocks of `lmkit.core.model` run."""
SLICE_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 28, "fused": 1 << 30}
"""Logits of a slice. 4 MiB of float32 stay in a core's cache; a GPU wants large matrix products, and the fused loss
holds a slice only once."""

Keep = Literal["input", "attention", "qkv", "products", "all"]
"""What a block keeps for its backward pass: its input alone; also the output of attention; also q, k, v; also the
outputs of the other matrix products but the last; or everything, so that nothing is computed again."""
KEEPS: tuple[Keep, ...] = get_args(Keep)

LOSS, HEAD, LAST, FIRST, EMBEDDING = MOMENTS = (
    "the loss",
    "the gradient of the head",
    "the backward pass of the last block",
    "the backward pass of the first block",
    "the gradient of the embedding",
)

SLOT_BYTES = 64 << 20
"""Largest piece of a shard that other GPUs can read at a time, in bytes."""
SEGMENTS_BYTES = 100_000_000
"""Most bytes that CUDA's caching allocator takes beyond the tensors of a model of less than 2 GB, for gaps in its
segments of 2 and 20 MiB."""
PEER_LAYER_BYTES = 256 << 20
"""If a layer's gathered weights have more bytes on average, the backend gathers them; else ranks copy them from each
other's GPUs. On two H200, NCCL is faster at 450 MB a layer, and copies, whose barriers occupy SMs, at 23 MB."""

NORM, INPUTS, QKV = "norms", "inputs of products", "q, k, v"
OUT, GATE_UP, SWIGLU = "attention", "gate, up", "SwiGLU"


@dataclass(frozen=True)
class Form:
    """How a model computes, as far as memory depends on it.

    Attributes:
        reuses_memory: the fact of the operations.
        stream, product: bytes of an element of the residual stream, and of what matrix products read and write.
        compiled: whether torch.compile compiles the blocks, from PyTorch's operations. `reuses_memory` then tells
            only of what runs before and after the blocks.
    """

    reuses_memory: bool
    device: str  # "cuda" or "cpu"
    stream: int
    product: int
    compiled: bool = False

    @property
    def blocks_reuse_memory(self) -> bool:
        return self.reuses_memory and not self.compiled


@cache
def saved(config: ModelConfig, form: Form) -> Mapping[str, int]:
    """Return kind -> bytes that a block keeps of each token if it computes nothing again.

    Attention kernels keep q, k, v, their output and a float32 per head and query (log-sum-exp); those that hold all
    scores keep them, too, of `config.context_length` keys. The compiler decides otherwise; this it kept on an H200.
    """
    d, d_q, d_kv, d_ff = config.d_model, config.width_of_heads, config.kv_heads * config.head_dim, config.d_ff
    others = config.switches - SWITCHES
    fused = form.blocks_reuse_memory and not others
    # The sum (PyTorch's operations on a CPU keep it normalised, in float32), and the inverse RMS.
    sums = max(form.stream, FLOAT) if form.device == "cpu" and not fused else form.stream
    attention = form.product * d_q + FLOAT * config.num_heads
    if ATTENTION.facts(config.attention).keeps_scores:
        attention += form.product * config.num_heads * config.context_length
        # The rotated ones, which are not contiguous.
        attention += 0 if fused else form.product * (d_q + 2 * d_kv)
    heads_normed = 0
    if config.qk_norm:  # on a CPU normalised in float32, elsewhere the projection before its norms
        wide = form.device == "cpu" and not fused
        heads_normed = max(form.product, FLOAT) * (d_q + d_kv) if wide else form.product * (d_q + 2 * d_kv)
        heads_normed += 0 if fused else FLOAT * (config.num_heads + config.kv_heads)  # the inverse RMS
    kinds = {
        NORM: 2 * (sums * d + FLOAT),
        INPUTS: form.product * 2 * d,  # of q, k, v and of gate, up
        # In place, or the rotated q and k beside the projection, of which v is a view.
        QKV: form.product * (d_q + 2 * d_kv + (0 if fused else d_q + d_kv)) + heads_normed,
        OUT: attention,
        GATE_UP: form.product * 2 * d_ff,
        SWIGLU: form.product * d_ff * (1 if fused or form.compiled else 2),  # the result, and silu(gate)
    }
    if others:
        without = config.model_copy(update={key: ModelConfig.model_fields[key].default for key in others})
        kinds[", ".join(sorted(others))] = _kept_by_core(config, form) - _kept_by_core(without, form)
    return kinds


def _kept_by_core(config: ModelConfig, form: Form) -> int:
    """Return the bytes that the core's block keeps of each token beside those of attention itself, as on a CPU."""
    tokens, kept = 16, dict[int, int]()
    dtype = torch.bfloat16 if form.product < FLOAT else torch.float32
    block: Any = TransformerBlock(config, device="meta", dtype=dtype)
    block.attn.attention = lambda q, k, v, **options: q
    constants = {parameter.untyped_storage()._cdata for parameter in block.parameters()}

    def pack(saved: torch.Tensor) -> torch.Tensor:
        storage = saved.untyped_storage()
        if storage._cdata not in constants:
            kept[storage._cdata] = storage.nbytes()
        return saved

    x = torch.empty(1, tokens, config.d_model, dtype=dtype, device="meta", requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        out = block(x, torch.empty(tokens, config.head_dim // 2, 2, device="meta"))
    del out  # until here, no storage takes the place of another
    return sum(kept.values()) // tokens


@cache
def kept(config: ModelConfig, form: Form, keep: Keep) -> Mapping[str, int]:
    """Return kind -> bytes that a block keeps of each token; see `Keep`."""
    of, x = saved(config, form), form.stream * config.d_model
    if keep == "all":
        return of
    qkv = of[QKV]
    if form.compiled:  # the product alone, which is normalised and rotated again
        qkv = form.product * (config.width_of_heads + 2 * config.kv_heads * config.head_dim)
    # What one level keeps more than the level before; beside the products the sum after attention.
    levels = {"inputs of blocks": x, OUT: of[OUT], QKV: qkv, GATE_UP: of[GATE_UP] + x}
    return dict(list(levels.items())[: KEEPS.index(keep) + 1])


def kept_by_layers(config: ModelConfig, form: Form, *, tokens: int) -> list[Keep]:
    """Return what each block keeps of a micro-batch of this many tokens.

    "selective" spends `config.activation_gb` on what saves most time for its bytes: first the outputs of attention,
    of which a GB takes ten times as many FLOPs as a GB of matrix products. The last blocks come first: their memory
    is free again when an earlier block computes anew.
    """
    layers = config.num_layers
    if config.activation_checkpointing != "selective":
        keep: dict[str, Keep] = {"none": "all", "block": "input", "attention": "attention"}
        return [keep[config.activation_checkpointing]] * layers
    assert config.activation_gb is not None
    cost = {keep: tokens * sum(kept(config, form, keep).values()) for keep in KEEPS}
    chosen: list[Keep] = ["input"] * layers
    left = config.activation_gb * GB - layers * cost["input"]
    for before, after in pairwise(KEEPS):
        for index in reversed(range(layers)):
            if chosen[index] == before and cost[after] - cost[before] <= left:
                left -= cost[after] - cost[before]
                chosen[index] = after
    return chosen


@dataclass(frozen=True)
class Held:
    """What one rank holds of the model, and in which dtypes.

    Attributes:
        weight, gradient: bytes of an element of a matrix and of its gradient; gains and their gradients are float32.
        master: bytes of the float32 copy of a matrix' element, or 0.
        state: bytes of a number of optimizer state.
        moments: numbers of optimizer state for each weight of the blocks' matrices.
        other_moments: the same for all other weights.
        of_weights, of_gradients, of_state: the share that the rank holds; of_state is of masters, too.
        gathered_units: blocks (or the embedding, or the head) whose whole weights it holds at a time, in the dtype of
            the products: two, or all; and whole gradients of the two before.
        packed: the share of the gradients that is copied, to be reduced.
        is_shared: whether other GPUs read from this rank's memory: its weights, or slots for gathered ones.
    """

    weight: int = FLOAT
    gradient: int = FLOAT
    master: int = 0
    state: int = FLOAT
    moments: int = 2
    other_moments: int = 2
    of_weights: float = 1.0
    of_gradients: float = 1.0
    of_state: float = 1.0
    gathered_units: int = 0
    packed: float = 0.0
    is_shared: bool = False


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes that a rank holds of a model, gradients with those that are copied. Masters are the optimizer's."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def training_memory(config: ModelConfig, held: Held = Held()) -> TrainingMemory:
    """Return the bytes of a model; by default in float32, with AdamW's moments, on one rank."""
    counts = count_parameters(config)
    vectors, matrices = counts.vectors, counts.total - counts.vectors
    state = held.moments * counts.in_blocks + held.other_moments * (counts.total - counts.in_blocks)
    return TrainingMemory(
        weights=int((held.weight * matrices + FLOAT * vectors) * held.of_weights),
        gradients=int((held.gradient * matrices + FLOAT * vectors) * (held.of_gradients + held.packed)),
        optimizer=int((held.master * matrices + held.state * state) * held.of_state),
    )


@dataclass(frozen=True)
class StepMemory(TrainingMemory):
    """Bytes of a training step on one rank.

    Attributes:
        activations: kind -> bytes that all blocks keep.
        recomputed: what one block computes again, at most at a time.
        loss: the gradient of the hidden states at the head, and that of the head's matrix in float32.
        logits: of the slice that exists at a time.
        gathered: whole weights and gradients of sharded units, at most at a time.
        moments: what the step does -> bytes at that moment; the largest is the peak.
    """

    activations: Mapping[str, int]
    recomputed: int
    loss: int
    logits: int
    gathered: int
    moments: Mapping[str, int] = field(repr=False)

    @property
    def peak(self) -> int:
        return max(self.moments.values())

    @property
    def most(self) -> int:
        """Bytes that the allocator takes for the peak on one rank, at most."""
        return max(self.peak + SEGMENTS_BYTES, int(1.05 * self.peak))

    @property
    def peaks_at(self) -> str:
        """The name of the moment at which memory is largest."""
        return max(self.moments, key=lambda name: self.moments[name])


def step_memory(
    config: ModelConfig, form: Form, held: Held, *, tokens: int, accumulation: int = 1
) -> StepMemory:
    """Count the bytes of a step in steady state, with `tokens` in a micro-batch on one rank."""
    d, layers, product = config.d_model, config.num_layers, form.product
    counts = count_parameters(config)
    assert config.vocab_size is not None
    table = config.vocab_size * d
    block = (counts.total - table * (1 if config.tie_embeddings else 2) - d) // layers  # weights
    # Kept from forward to backward.
    casts = product * counts.in_blocks if form.product < form.stream else 0

    model = training_memory(config, held)

    def gradients(elements: int) -> int:
        return int(held.gradient * elements * (held.of_gradients + held.packed))

    gathered = _gathered(config, form, held, table=table, block=block)
    base = model.weights + model.optimizer
    if held.is_shared and not held.gathered_units:
        base += segment(model.weights) - model.weights
    # Sums of more than two micro-batches in bf16 are float32.
    if accumulation > 1:
        base += model.gradients * (2 if accumulation > 2 and held.gradient < FLOAT else 1)

    keeps = kept_by_layers(config, form, tokens=tokens)
    activations = dict.fromkeys(("inputs of blocks", *saved(config, form)), 0)
    for keep in keeps:
        for kind, size in kept(config, form, keep).items():
            activations[kind] += tokens * size
    last_norm = tokens * (saved(config, form)[NORM] // 2)  # in front of the head
    activations[NORM] += last_norm
    if casts:
        activations["cast weights"] = casts
    blocks = sum(activations.values())

    stream, hidden = tokens * form.stream * d, tokens * product * d
    logits, loss_only = _loss(config, form, tokens)
    one_slice = tokens <= tokens_per_slice(config.vocab_size, "fused")
    of_sums = product if form.reuses_memory and one_slice else FLOAT
    loss = hidden + of_sums * table + COUNT
    # While the head's gradient is scaled and rounded to the weights' dtype.
    narrow_head = product if product < of_sums else 0
    wide_head = ((1 if form.reuses_memory else 2) * of_sums + narrow_head) * table
    again = [_recomputed(config, form, keep) for keep in keeps]
    # A block's backward pass takes most at SwiGLU: gradients of the residual stream, around the result, and of w2.
    at_swiglu = stream + tokens * product * config.d_ff * (1 if form.blocks_reuse_memory else 2)
    at_swiglu += gradients(d * config.d_ff)
    in_last, in_first = (tokens * part + at_swiglu for part in (again[-1], again[0]))
    # An untied head's whole gradient is being reduced, see `_gathered`; this rank's share is not there yet.
    head = 0 if held.gathered_units and not config.tie_embeddings else gradients(table)
    without_embedding = gradients(counts.total - (0 if config.tie_embeddings else table))
    embedding = 0 if config.tie_embeddings else gradients(table)
    if form.reuses_memory:
        embedding += FLOAT * table if held.gradient < FLOAT or config.tie_embeddings else 0
    elif config.tie_embeddings:
        embedding += held.gradient * table
    return StepMemory(
        **vars(model),
        activations=activations,
        recomputed=tokens * max(again),
        loss=loss,
        logits=logits,
        gathered=max(gathered.values()),
        moments={
            moment: base + gathered[moment] + more
            for moment, more in {
                LOSS: blocks + loss + loss_only,
                HEAD: blocks + hidden + wide_head,
                LAST: blocks - last_norm + head + in_last,
                FIRST: without_embedding
                - gradients(block)
                + tokens * sum(kept(config, form, keeps[0]).values())
                + in_first,
                EMBEDDING: without_embedding + embedding + stream,
            }.items()
        },
    )


def segment(num_bytes: int) -> int:
    """Return what CUDA's caching allocator takes for a tensor of a pool of its own."""
    if num_bytes <= MIB:
        return 2 * MIB
    return 20 * MIB if num_bytes < 10 * MIB else -(-num_bytes // (2 * MIB)) * 2 * MIB


def _gathered(config: ModelConfig, form: Form, held: Held, *, table: int, block: int) -> dict[str, int]:
    """Return moment -> bytes of the whole weights and gradients of sharded units: the embedding and the head have
    `table` weights each, a block has `block`."""
    if not held.gathered_units:
        return dict.fromkeys(MOMENTS, 0)
    keeps, tables = held.gathered_units > 2, table if config.tie_embeddings else 2 * table
    every = config.num_layers * block
    weights = {
        LOSS: tables + every if keeps else table,
        HEAD: tables + every if keeps else table + block,
        LAST: table + every if keeps else 2 * block,
        FIRST: block + table,
        EMBEDDING: table,
    }
    of_head = 0 if config.tie_embeddings else table  # the embedding's is added before they are reduced
    gradients = {LOSS: 0, HEAD: 0, LAST: of_head, FIRST: 2 * block, EMBEDDING: table + block}
    slot = min(SLOT_BYTES, int(form.product * max(table, block) * held.of_weights))
    # Gathered by themselves: the blocks, the embedding, the last norm, RoPE, the head.
    small = form.product * (every + tables) <= PEER_LAYER_BYTES * (config.num_layers + 4)
    slots = segment(2 * slot) if held.is_shared and small else 0
    return {moment: slots + form.product * (weights[moment] + gradients[moment]) for moment in MOMENTS}


def _recomputed(config: ModelConfig, form: Form, keep: Keep) -> int:
    """Return the bytes of a token that a block computes again at a time."""
    of, x = saved(config, form), form.stream * config.d_model
    after = of[NORM] // 2 + of[INPUTS] // 2 + of[GATE_UP] + of[SWIGLU]
    before = of[NORM] // 2 + of[INPUTS] // 2 + of[QKV]
    return {
        "input": sum(of.values()) - (x if form.blocks_reuse_memory or form.device == "cuda" else 0),
        "attention": max(before, after),
        "qkv": after,
        "products": of[SWIGLU],
        "all": 0,
    }[keep]


def _loss(config: ModelConfig, form: Form, tokens: int) -> tuple[int, int]:
    """Return the bytes of a slice of logits; and of all that exists only while the loss is computed."""
    vocab_size, product = config.vocab_size, form.product
    assert vocab_size is not None
    rows = min(tokens, tokens_per_slice(vocab_size, "fused" if form.reuses_memory else form.device))
    slices = -(-tokens // rows)
    hidden = tokens * product * config.d_model
    table = vocab_size * config.d_model
    cast = product * table if form.product < form.stream else 0
    if form.reuses_memory:
        logits = rows * -(-vocab_size // 16) * 16 * product
        return logits, logits + hidden + cast
    logits = rows * vocab_size * product
    earlier = min(slices, 2) - 1  # the gradient of the slice before
    if form.compiled:
        return logits, (2 + earlier) * logits + hidden + cast
    # Logits, and log-probabilities in float32, with the float32 logits that they are made of; then a product to add.
    wide = rows * vocab_size * FLOAT * (2 if product < FLOAT else 1)
    adding = 2 * logits + (product * table if product < FLOAT else 0)
    return logits, max((1 + earlier) * logits + wide, adding) + hidden + cast


def tokens_per_slice(vocab_size: int, kind: str) -> int:
    """Return the tokens whose logits exist at a time. `kind` is a type of device, or "fused"."""
    fitting = max(1, SLICE_ELEMENTS.get(kind, SLICE_ELEMENTS["cuda"]) // vocab_size)
    return 1 << (fitting.bit_length() - 1)  # a power of two divides the usual batches evenly
