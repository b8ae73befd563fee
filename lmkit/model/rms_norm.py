"""Root-mean-square normalisation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lmkit.autograd import differentiable_once


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019, eq. 4).

    Statistics are computed in float32 (float64 for float64 inputs) whatever the dtype of x; the result has x's dtype.
    """

    def __init__(
        self,
        d_model: int,
        *,
        eps: float,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Back to gains of one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_model) -> (..., d_model)"""
        if x.device.type == "cpu" and x.dtype == self.weight.dtype and not torch.compiler.is_compiling():
            # PyTorch has a fused kernel on CUDA and a compiler everywhere; on a plain CPU it runs a chain of some
            # twenty operations that takes four times as long as these eight.
            return _RMSNormByHand.apply(x, self.weight, self.eps)[0]
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class _RMSNormByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(x.dtype, torch.float32)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)  # (..., 1)
        inverse_rms = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()  # (..., 1)
        unit = x * inverse_rms  # (..., d_model)
        empty = x.new_empty(0)  # for `differentiable_once`; the result itself may be written to
        ctx.set_materialize_grads(False)  # or autograd would fill a gradient of `empty` with zeros
        ctx.save_for_backward(unit, inverse_rms, weight, empty)
        return (unit * weight).to(x.dtype), empty

    @staticmethod
    @differentiable_once("RMSNorm on a CPU", instead="torch.nn.functional.rms_norm has a second derivative")
    def backward(ctx: Any, saved: Any, grad: Tensor, _: None) -> tuple[Tensor, Tensor, None]:
        # y = w u with u = x r, r = (mean(x^2) + eps)^-1/2, so that du/dx = r (1 - u u^T / d).
        unit, inverse_rms, weight = saved[:3]
        product = grad * unit  # (..., d_model)
        grad_weight = product.reshape(-1, product.shape[-1]).sum(dim=0)  # (d_model)
        along_unit = (product @ weight.to(product.dtype)).unsqueeze(-1) / unit.shape[-1]  # (..., 1)
        grad_x = torch.addcmul(grad * weight, unit, along_unit, value=-1).mul_(inverse_rms)
        return grad_x.to(grad.dtype), grad_weight.to(weight.dtype), None
