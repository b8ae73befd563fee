"""`[model]`: the shape of the Transformer. A preset fills in what the recipe leaves out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from lmkit.recipe.table import AttentionName, PositiveFloat, PositiveInt, Table

PRESETS: dict[str, dict[str, int]] = {
    "tiny": {"d_model": 192, "d_ff": 512, "num_layers": 4, "num_heads": 6},
    "small": {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
    "medium": {"d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_heads": 16},
    "large": {"d_model": 1280, "d_ff": 5120, "num_layers": 36, "num_heads": 20},
    "xl": {"d_model": 1600, "d_ff": 6400, "num_layers": 48, "num_heads": 25},
    "2.7b": {"d_model": 2560, "d_ff": 10240, "num_layers": 32, "num_heads": 32},
}
"""Named sizes after GPT-2 and GPT-3 (Brown et al. 2020, table 2.1). With SwiGLU's third matrix and an untied head
the real parameter counts are larger than those tables say; `lmkit recipe show` prints them."""


class ModelConfig(Table):
    preset: Literal["tiny", "small", "medium", "large", "xl", "2.7b"] | None = None
    """Fills in d_model, d_ff, num_layers and num_heads where the recipe leaves them out."""
    vocab_size: PositiveInt | None = None
    """Left out: that of the token file."""
    context_length: PositiveInt = 256
    """Tokens that the model sees at once."""
    d_model: PositiveInt = 192
    """Width of the residual stream."""
    d_ff: PositiveInt = 512
    """Width inside the feed-forward part (SwiGLU: three matrices of d_model x d_ff)."""
    num_layers: PositiveInt = 4
    """Blocks."""
    num_heads: PositiveInt = 6
    """Attention heads; each has d_model / num_heads dimensions."""
    num_kv_heads: PositiveInt | None = None
    """Grouped-query attention (Ainslie et al. 2023) when smaller than `num_heads`; left out: equal to it."""
    rope_theta: PositiveFloat = 10_000.0
    """Base of the wavelengths of rotary position embeddings (Su et al. 2021)."""
    norm_eps: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """Added to the mean square in RMSNorm."""
    tie_embeddings: bool = False
    """One matrix for the input embedding and the head."""
    attention: AttentionName = "sdpa"
    """The kernel; `lmkit env` says which run here."""
    activation_checkpointing: bool = False
    """Compute activations again in backward instead of keeping them: less memory, more time."""
    compile: Literal["none", "block", "whole"] = "none"
    """torch.compile, of one block (starts soon) or of the whole stack."""

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelConfig:
        check_heads(self.d_model, self.num_heads)
        if self.num_heads % self.kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not divisible by num_kv_heads {self.kv_heads}")
        return self

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads


def check_heads(d_model: int, num_heads: int) -> None:
    """Raises ValueError: a model of this width cannot have so many heads."""
    if d_model % num_heads:
        raise ValueError(f"d_model {d_model} is not divisible by num_heads {num_heads}")
    if d_model // num_heads % 2:
        raise ValueError(f"d_model / num_heads = {d_model // num_heads} is odd, and RoPE rotates pairs")


def forget_sizes(table: dict[str, Any]) -> None:
    """Take out what a preset would fill in: for a preset that is to count more than the recipe it is given to."""
    for key in {key for sizes in PRESETS.values() for key in sizes}:
        table.pop(key, None)


def fill_preset(table: dict[str, Any]) -> dict[str, Any]:
    """Put a preset's sizes where the recipe gives none. An unknown preset is left for validation to refuse."""
    preset = table.get("preset")
    sizes = PRESETS.get(preset, {}) if isinstance(preset, str) else {}
    return {**sizes, **table}
