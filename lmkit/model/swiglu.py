"""The gated feed-forward network."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lmkit.model.linear import Linear


class SwiGLU(nn.Module):
    """W2 (silu(W1 x) * W3 x) (Shazeer 2020, "GLU Variants Improve Transformer", eq. 6, without biases)."""

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.w1 = Linear(d_model, d_ff, device=device, dtype=dtype)
        self.w2 = Linear(d_ff, d_model, device=device, dtype=dtype)
        self.w3 = Linear(d_model, d_ff, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, d_model) -> (batch, seq, d_model)"""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))
