"""`[bench.*]`: what each benchmark measures. Every value has a default that takes minutes on a CPU or less."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from lmkit.recipe.tables import (
    AttentionName,
    AttentionVariant,
    Count,
    PositiveFloat,
    PositiveInt,
    StrategyName,
    StrategyVariant,
    Table,
    check_heads,
)

Precision = Literal["fp32", "bf16", "fp16"]
Sizes = Literal["tiny", "small", "medium", "large", "xl", "2.7b"]


class BenchAttentionConfig(Table):
    suite: Literal["sweep", "acceptance"] = "sweep"
    """`acceptance`: fixed cases with their targets; of the rest only warmup, iters and max_seconds count."""
    dtype: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """Of q, k and v; tf32: fp32 inputs, multiplied in tf32."""
    batch: PositiveInt = 4
    """Sequences."""
    heads: PositiveInt = 12
    """Of the queries."""
    kv_heads: PositiveInt = 12
    """Of keys and values; fewer than heads: grouped-query attention."""
    head_dim: PositiveInt = 64
    """Of the tiers."""
    causal: bool = True
    """Query i sees keys j <= i; false: all keys."""
    backward: bool = False
    """Also forward + backward, and backward alone."""
    tiers: tuple[str, ...] = ("Small", "Medium", "Large", "XL")
    """Names (Small 128 ... XXL 2048, 4k ... 128k), lengths, or rectangles queries:keys."""
    kernels: tuple[AttentionVariant, ...] = ()
    """Registry names, `sdpa:cudnn|flash|efficient`, `flash_triton:portable|hopper|deterministic`, each with an
    optional `+compile`; `flash_triton:tf32` multiplies fp32 inputs in tf32; empty: what is usual on the device."""
    grid_head_dims: tuple[PositiveInt, ...] = ()
    """The head_dim x length sweep, forward only; empty: none."""
    grid_lengths: tuple[PositiveInt, ...] = ()
    """As many lengths for each of them."""
    grid_kernels: tuple[AttentionVariant, ...] = ()
    """Of the sweep; empty: the baseline, ours and PyTorch's."""
    baseline: AttentionVariant = "vectorized"
    """The kernel that speed-ups are relative to."""
    projection_layout: bool = False
    """q, k, v as strided views of one projection instead of contiguous tensors."""
    data: Literal["normal", "logits x 8", "sink", "late sink", "ramp up", "ramp down"] = "normal"
    """Kind of input: random normal, or what trained models make of it."""
    warmup: Count = 10
    """Calls before those that are timed."""
    iters: PositiveInt = 50
    """Timed calls, at most."""
    cold_cache: bool = False
    """Overwrite the L2 cache before every sample."""
    max_seconds: PositiveFloat = 2.0
    """Of timing per case and direction, shared by the kernels: slow ones sit out rounds."""
    longest_call_seconds: PositiveFloat = 0.5
    """A kernel that a shorter case shows to need longer than this for one call is skipped."""


class BenchModelConfig(Table):
    sizes: tuple[Sizes, ...] = ("tiny",)
    """Presets of [model]."""
    lengths: tuple[PositiveInt, ...] = (256,)
    """Tokens per sequence."""
    precisions: tuple[Precision, ...] = ("fp32",)
    """Each is measured."""
    compile: tuple[Literal["none", "block", "whole"], ...] = ("none",)
    """Each is measured."""
    modes: tuple[Literal["forward", "fwd+bwd", "step"], ...] = ("forward", "fwd+bwd", "step")
    """`step`: forward, backward, clipping and AdamW."""
    attention: AttentionName = "sdpa"
    """The attention kernel, one for all."""
    activation_checkpointing: bool = False
    """As in [model]."""
    tie_embeddings: bool = False
    """As in [model]."""
    vocab_size: PositiveInt = 10_000
    """Of the random tokens."""
    batch_size: PositiveInt = 4
    """Sequences."""
    warmup: Count = 5
    """Steps before those that are timed."""
    iters: PositiveInt = 10
    """Timed steps, at most."""
    warmup_study: tuple[Count, ...] = (0, 1, 2, 5)
    """Numbers of warm-up steps to compare, on the first model; empty: none."""
    max_seconds: PositiveFloat = 60.0
    """Of timing per model; whole rounds only."""


class BenchRanksConfig(Table):
    """What `bench ddp` and `bench optimizer` have in common; the model comes from [model]."""

    rows: PositiveInt = 4
    """Sequences per rank and step."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of the matrix products."""
    contenders: tuple[StrategyVariant, ...] = ()
    """Strategies and rivals; empty: the whole ladder."""
    rounds: PositiveInt = 10
    """Interleaved samples of each contender; fewer than 6 give no interval."""
    steps_per_sample: PositiveInt = 4
    """Training steps that one sample times; half as many, untimed, lead into it."""


class BenchDdpConfig(BenchRanksConfig):
    bucket_sweep_mb: tuple[PositiveFloat, ...] = (1, 10, 100, 1000)
    """Bucket sizes in MiB to compare; empty: no sweep."""
    max_seconds: PositiveFloat = 600.0
    """Of timing, of the contenders and again of the bucket sizes; whole rounds only."""


class BenchAllReduceConfig(Table):
    sizes_mb: tuple[PositiveFloat, ...] = (1, 4, 16, 25, 64)
    """Of the whole buffer, in 10^6 bytes."""
    dtypes: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16")
    """Of the buffer."""
    repeats: PositiveInt = 10
    """Samples of each size."""


class BenchTokenizerConfig(Table):
    texts: tuple[Path, ...] = ()
    """Text files; empty: `synth_mb` of generated stories."""
    synth_mb: PositiveFloat = 20.0
    """Size of the generated stories, in 10^6 bytes."""
    tasks: tuple[Literal["train", "encode"], ...] = ("train", "encode")
    """What is timed."""
    vocab_sizes: tuple[Annotated[int, Field(ge=257)], ...] = (10_000,)
    """256 bytes + merges + `<|endoftext|>`."""
    workers: tuple[PositiveInt, ...] = (1, 2)
    """Threads to compare."""
    rounds: PositiveInt = 5
    """Interleaved samples of each contender."""


class BenchLmMatrixConfig(Table):
    kernels: tuple[AttentionName, ...] = ("vectorized", "flash_torch", "sdpa")
    """Attention kernels, the rows of the matrix."""
    strategies: tuple[StrategyName, ...] = ("none",)
    """Of gradient synchronisation, the columns of the matrix."""
    num_layers: PositiveInt = 2
    """Blocks of the model."""
    d_model: PositiveInt = 64
    """Width of its residual stream."""
    d_ff: PositiveInt = 192
    """Width inside its feed-forward part."""
    num_heads: PositiveInt = 4
    """Its attention heads; each has d_model / num_heads dimensions."""
    context_length: PositiveInt = 64
    """Tokens per sequence."""
    vocab_size: PositiveInt = 256
    """No less than the tokens have: the bytes of generated stories are 256."""
    tie_embeddings: bool = False
    """As in [model]."""
    compile: Literal["none", "block", "whole"] = "none"
    """As in [model]."""
    activation_checkpointing: bool = False
    """As in [model]."""
    precision: Precision = "fp32"
    """Of the matrix products (autocast)."""
    batch_size: PositiveInt = 8
    """Sequences per step over all ranks."""
    steps_per_epoch: PositiveInt = 5
    """An epoch is what one sample times."""
    warmup_epochs: Count = 1
    """Before those that are timed."""
    timed_epochs: PositiveInt = 6
    """Samples of each cell; fewer than 6 give no interval."""
    bucket_mb: PositiveFloat = 50.0
    """Bucket size in MiB (`bucketed`, `torch_ddp`, `zero1`)."""
    tokens: Path | None = None
    """A token file; left out: the bytes of generated stories."""
    lr: PositiveFloat = 3e-4
    """Constant."""

    @model_validator(mode="after")
    def _heads_divide(self) -> BenchLmMatrixConfig:
        check_heads(self.d_model, self.num_heads)
        return self


class BenchConfig(Table):
    attention: BenchAttentionConfig | None = None
    model: BenchModelConfig | None = None
    lm_matrix: BenchLmMatrixConfig | None = None
    ddp: BenchDdpConfig | None = None
    all_reduce: BenchAllReduceConfig | None = None
    optimizer: BenchRanksConfig | None = None
    tokenizer: BenchTokenizerConfig | None = None
