"""Matrix product without bias, and its initialisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Linear(nn.Module):
    """y = x W^T with W `weight` (out_features, in_features).

    Initialised with a normal distribution of variance 2 / (in + out) (Glorot and Bengio 2010, eq. 12: signals keep
    their scale forwards, gradients backwards), cut at three standard deviations so that no weight starts as an
    outlier.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew from torch's default generator."""
        std = (2 / (self.in_features + self.out_features)) ** 0.5
        nn.init.trunc_normal_(self.weight, std=std, a=-3 * std, b=3 * std)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)"""
        return F.linear(x, self.weight)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}"
