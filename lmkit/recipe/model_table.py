"""The table `[model]`: the shape of the Transformer, and the switches that change its function."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from lmkit.recipe.values import AttentionName, Only, OperationsName, PositiveFloat, PositiveInt, Table
from lmkit.registry import ATTENTION

OWN = "own"
"""Marks a key of [model] that, unless it has its default, makes another function than Llama's; see
`ModelConfig.switches`."""
OF_LLAMA3 = Only("model.rope_scaling", among=("llama3",))

PRESETS: dict[str, dict[str, int]] = {
    "tiny": {"d_model": 192, "d_ff": 512, "num_layers": 4, "num_heads": 6},
    "small": {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
    "medium": {"d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_heads": 16},
    "large": {"d_model": 1280, "d_ff": 5120, "num_layers": 36, "num_heads": 20},
    "xl": {"d_model": 1600, "d_ff": 6400, "num_layers": 48, "num_heads": 25},
    "2.7b": {"d_model": 2560, "d_ff": 10240, "num_layers": 32, "num_heads": 32},
}
"""Sizes named after GPT-2 and GPT-3 (Brown et al. 2020, table 2.1). SwiGLU's third matrix and an untied head make the
models larger than their namesakes; `lmkit recipe show` prints the parameter count."""

Checkpointing = Literal["none", "block", "attention"]


class ModelConfig(Table):
    """`[model]`: the shape of the Transformer. A preset fills in what the recipe leaves out."""

    preset: Literal["tiny", "small", "medium", "large", "xl", "2.7b"] | None = None
    """Sets d_model, d_ff, num_layers and num_heads unless the recipe gives them."""
    depth: Annotated[int, Field(ge=1, le=1024)] | None = None
    """One dial, the number of layers: width, heads, batch, learning rate and steps follow from it unless the recipe
    gives them."""
    vocab_size: PositiveInt | None = None
    """Default: the vocabulary size of the token file."""
    context_length: PositiveInt = 256
    """Tokens that the model sees at once."""
    d_model: PositiveInt = 192
    """Width of the residual stream."""
    d_ff: PositiveInt = 512
    """Width of the feed-forward part: three matrices of d_model x d_ff."""
    num_layers: Annotated[int, Field(gt=0, le=10_000)] = 4
    """Transformer blocks."""
    num_heads: PositiveInt = 6
    """Attention heads; each has d_model / num_heads dimensions."""
    num_kv_heads: PositiveInt | None = None
    """Fewer than `num_heads`: grouped-query attention (Ainslie et al. 2023). Default: `num_heads`."""
    rope_theta: PositiveFloat = 10_000.0
    """Base of the wavelengths of rotary position embeddings (Su et al. 2021)."""
    rope_scaling: Annotated[Literal["none", "linear", "llama3"], Only("model.rope_factor", but=(1,))] = "none"
    """Slower rotations for longer contexts: all of them (`linear`, Chen et al. 2023), or those of long wavelengths
    (`llama3`, as in Llama 3.1)."""
    rope_factor: Annotated[PositiveFloat, Only("model.rope_scaling", but=("none",))] = 1.0
    """How much slower."""
    rope_low_freq_factor: Annotated[PositiveFloat, OF_LLAMA3] = 1.0
    """Wavelengths of more than `rope_original_context` / this are scaled in full."""
    rope_high_freq_factor: Annotated[PositiveFloat, OF_LLAMA3] = 4.0
    """Wavelengths of less than `rope_original_context` / this are not scaled."""
    rope_original_context: Annotated[PositiveInt, OF_LLAMA3] = 8192
    """Tokens that the model saw at once before its wavelengths were scaled."""
    qkv_bias: Annotated[bool, OWN] = False
    """Add a bias to queries, keys and values, as Qwen2 does."""
    qk_norm: Annotated[bool, OWN] = False
    """RMSNorm of each head's query and key, in front of RoPE, with one gain for all heads (as Qwen3)."""
    attention_window: Annotated[PositiveInt | None, OWN] = None
    """Tokens that a short layer sees, itself among them; see `attention_pattern`."""
    attention_pattern: Annotated[str, Field(pattern="^[SL]+$"), Only("model.attention_window")] = "SSSL"
    """Short and long layers, repeated from the first; a long layer sees all earlier tokens, and the last is long."""
    separate_documents: bool = False
    """In training and evaluation a token sees its own document only; generation reads whole prompts nevertheless.
    `data.sampling = "packed"` sets it."""
    zero_init: bool = False
    """Start the matrices that write to the residual stream from zeros: each block begins as the identity."""
    norm_eps: Annotated[PositiveFloat, Field(lt=1)] = 1e-5
    """Added to the mean square in RMSNorm."""
    tie_embeddings: bool = False
    """Share one matrix between the input embedding and the head."""
    attention: AttentionName = "sdpa"
    """The attention kernel; `lmkit env` lists the kernels that run here."""
    operations: OperationsName = "auto"
    """What runs around the matrix products: kernels ("fused") or PyTorch's operations ("plain"). "auto" takes "fused"
    where they run, but "plain" in compiled blocks."""
    activation_checkpointing: Literal["none", "block", "attention", "selective"] = "none"
    """Recompute activations in the backward pass: less memory, more time. `block` keeps the inputs of blocks,
    `attention` the outputs of attention, too; `selective` as much as `activation_gb` allows, the dearest first."""
    activation_gb: PositiveFloat | None = None
    """`selective`: GB (10^9 bytes) that the blocks keep of a micro-batch on a rank; at least their inputs."""
    compile: Literal["none", "block", "whole"] = "none"
    """Use torch.compile on each block (starts sooner) or on the whole stack."""

    @model_validator(mode="after")
    def _one_dial(self) -> ModelConfig:
        if self.preset is not None and self.depth is not None:
            raise ValueError("preset and depth both give the sizes; leave one out")
        return self

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelConfig:
        check_heads(self.d_model, self.num_heads)
        if self.num_heads % self.kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not divisible by num_kv_heads {self.kv_heads}")
        return self

    @model_validator(mode="after")
    def _wavelengths_are_in_order(self) -> ModelConfig:
        low, high = self.rope_low_freq_factor, self.rope_high_freq_factor
        if low >= high:
            raise ValueError(f"rope_low_freq_factor {low} is not below rope_high_freq_factor {high}")
        return self

    @model_validator(mode="after")
    def _selects_within_a_budget(self) -> ModelConfig:
        if (self.activation_checkpointing == "selective") != (self.activation_gb is not None):
            raise ValueError('activation_checkpointing = "selective" and activation_gb need each other')
        return self

    @model_validator(mode="after")
    def _kernel_takes_windows(self) -> ModelConfig:
        for key in ("attention_window", "separate_documents"):
            if getattr(self, key) not in (None, False) and not ATTENTION.facts(self.attention).windows:
                raise ValueError(
                    f'{key}: attention = "{self.attention}" takes none; use {kernels_with_first()}'
                )
        return self

    @property
    def switches(self) -> frozenset[str]:
        """The keys that make another function than Llama's and do not have their defaults.

        Code that computes the model by itself (a decode step, an exchange format) lists the switches that it
        implements, and is not used for a model with others.
        """
        fields = type(self).model_fields.items()
        return frozenset(
            key for key, field in fields if OWN in field.metadata and getattr(self, key) != field.default
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the values by key; tools for Hugging Face's models, such as PEFT, ask a model's `config` for it."""
        return self.model_dump(mode="json") | {"tie_word_embeddings": self.tie_embeddings}

    def window(self, layer: int) -> int | None:
        """Return how many tokens a layer's tokens see at most; None: all earlier ones."""
        is_long = (
            layer == self.num_layers - 1 or self.attention_pattern[layer % len(self.attention_pattern)] == "L"
        )
        return None if is_long else self.attention_window

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads


def kernels_with_first() -> str:
    """Return the names of the attention kernels that can hide a sequence's beginning, for a hint."""
    return ", ".join(name for name in ATTENTION.names if ATTENTION.facts(name).windows)


def check_heads(d_model: int, num_heads: int) -> None:
    """Raise ValueError if a model of this width cannot have this many heads."""
    if d_model % num_heads:
        raise ValueError(f"d_model {d_model} is not divisible by num_heads {num_heads}")
    if d_model // num_heads % 2:
        raise ValueError(f"d_model / num_heads = {d_model // num_heads} is odd, and RoPE rotates pairs")
