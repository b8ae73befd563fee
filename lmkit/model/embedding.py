"""Token ids to vectors."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Embedding(nn.Module):
    """Row `id` of `weight` (vocab_size, d_model) for each id.

    Initialised with a standard normal distribution cut at three standard deviations: the residual stream then
    starts at the unit scale that every RMSNorm returns to (Takase et al. 2023, "Spike No More": embeddings that are
    small against what the blocks add make training unstable).
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the vectors anew from torch's default generator."""
        nn.init.trunc_normal_(self.weight, std=1.0, a=-3.0, b=3.0)

    def forward(self, ids: Tensor) -> Tensor:
        """(batch, seq) -> (batch, seq, d_model)"""
        return F.embedding(ids, self.weight)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, {self.weight.shape[1]}"
