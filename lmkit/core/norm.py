"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * gain (Zhang and Sennrich 2019, eq. 4)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lmkit.core.autograd import differentiable_once


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of x over the last dimension, (..., d_model) -> (..., d_model), in the dtype of x.

    Statistics are computed in float32 (float64 for float64 inputs) whatever the dtype of x.
    """
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        # PyTorch fuses this on CUDA, and its compiler fuses it everywhere. Eager on a CPU, it runs a chain of
        # about twenty operations, which is slower than the eight of `RMSNormOnCPU`.
        return RMSNormOnCPU.apply(x, gain, eps)[0]
    return F.rms_norm(x, gain.shape, gain.to(x.dtype), eps)


class RMSNormOnCPU(torch.autograd.Function):
    """RMSNorm with its gradient written by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(x.dtype, torch.float32)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)  # (..., 1)
        inverse_rms = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()  # (..., 1)
        unit = x * inverse_rms  # (..., d_model)
        # `differentiable_once` needs an output among the saved tensors; the result may be written to in place.
        empty = x.new_empty(0)
        ctx.set_materialize_grads(False)  # or autograd would allocate zeros as the gradient of `empty`
        ctx.save_for_backward(unit, inverse_rms, gain, empty)
        return (unit * gain).to(x.dtype), empty

    @staticmethod
    @differentiable_once("RMSNorm on a CPU", instead="torch.nn.functional.rms_norm has a second derivative")
    def backward(ctx: Any, saved: Any, grad: Tensor, _: None) -> tuple[Tensor, Tensor, None]:
        # y = w u with u = x r and r = (mean(x^2) + eps)^-1/2, hence du/dx = r (1 - u u^T / d).
        unit, inverse_rms, gain = saved[:3]
        product = grad * unit  # (..., d_model)
        grad_gain = product.reshape(-1, product.shape[-1]).sum(dim=0)  # (d_model)
        along_unit = (product @ gain.to(product.dtype)).unsqueeze(-1) / unit.shape[-1]  # (..., 1)
        grad_x = torch.addcmul(grad * gain, unit, along_unit, value=-1).mul_(inverse_rms)  # (..., d_model)
        return grad_x.to(grad.dtype), grad_gain.to(gain.dtype), None
