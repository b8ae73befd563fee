"""One Transformer layer: attention and feed-forward network, each behind a norm and beside a residual path."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lmkit.attention import attention_function
from lmkit.measure.ranges import range_
from lmkit.model.linear import Linear
from lmkit.model.rms_norm import RMSNorm
from lmkit.model.rope import rotate
from lmkit.model.swiglu import SwiGLU
from lmkit.recipe.model import ModelConfig


class LayerCache(Protocol):
    """The keys and values that one layer remembers while text is generated (see `lmkit.generation.kv_cache`)."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v (batch, kv_heads, seq, head_dim); return q's attention to all that is stored,
        (batch, heads, seq, head_dim)."""
        ...


class SelfAttention(nn.Module):
    """Causal multi-head attention with rotary positions; fewer key/value heads than query heads where the
    configuration says so (Ainslie et al. 2023)."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.kv_heads = config.kv_heads
        self.head_dim = config.head_dim
        self.attention = attention_function(config.attention)
        d_kv = self.kv_heads * self.head_dim
        self.q_proj = Linear(config.d_model, config.d_model, device=device, dtype=dtype)
        self.k_proj = Linear(config.d_model, d_kv, device=device, dtype=dtype)
        self.v_proj = Linear(config.d_model, d_kv, device=device, dtype=dtype)
        self.output_proj = Linear(config.d_model, config.d_model, device=device, dtype=dtype)

    def forward(self, x: Tensor, rotations: Tensor, cache: LayerCache | None = None) -> Tensor:
        """(batch, seq, d_model) -> (batch, seq, d_model)"""
        # One matrix product for q, k and v, and one rotation for q and k: fewer and larger operations. The matrices
        # stay apart as parameters; joining them costs little beside the product.
        joint = torch.cat((self.q_proj.weight, self.k_proj.weight, self.v_proj.weight))
        heads = F.linear(x, joint)  # (batch, seq, (heads + 2 kv_heads) * head_dim)
        heads = heads.unflatten(-1, (-1, self.head_dim))  # (batch, seq, heads + 2 kv_heads, head_dim)
        qk, v = heads.split((self.num_heads + self.kv_heads, self.kv_heads), dim=2)
        q, k = rotate(qk, rotations).split((self.num_heads, self.kv_heads), dim=2)
        # (batch, heads, seq, head_dim) as views: no copy.
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        with range_("attention"):
            out = self.attention(q, k, v, causal=True) if cache is None else cache.attend(q, k, v)
        return self.output_proj(out.transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Pre-norm residual layer (Xiong et al. 2020): x + attn(ln1(x)), then x + ffn(ln2(x))."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.ln1 = RMSNorm(config.d_model, eps=config.norm_eps, device=device, dtype=dtype)
        self.attn = SelfAttention(config, device=device, dtype=dtype)
        self.ln2 = RMSNorm(config.d_model, eps=config.norm_eps, device=device, dtype=dtype)
        self.ffn = SwiGLU(config.d_model, config.d_ff, device=device, dtype=dtype)

    def forward(self, x: Tensor, rotations: Tensor, cache: LayerCache | None = None) -> Tensor:
        """(batch, seq, d_model) -> (batch, seq, d_model)"""
        x = x + self.attn(self.ln1(x), rotations, cache)
        return x + self.ffn(self.ln2(x))
