"""The operations of a Transformer as fused Triton kernels (`lmkit.kernels`), for CUDA devices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lmkit.attention.flash_triton import heads_of
from lmkit.core.loss import SliceGradient
from lmkit.errors import UsageError
from lmkit.kernels.cross_entropy import linear_cross_entropy
from lmkit.kernels.embedding import embedding
from lmkit.kernels.norm import add_rms_norm, heads_norm, rms_norm
from lmkit.kernels.rope import rope_
from lmkit.kernels.swiglu import swiglu, swiglu_and_cast
from lmkit.kernels.versions import INTERPRETED
from lmkit.model.memory import tokens_per_slice
from lmkit.model.operations import Operations
from lmkit.registry import OPERATIONS

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OLDEST = (8, 0)  # a T4 has 7.5


@OPERATIONS.register(
    "fused", order=1, requires=("triton",), devices=("cuda",), check="refuse_unsupported", reuses_memory=True
)
class Fused(Operations):
    """Each operation reads and writes memory once. Swiglu, RoPE and the loss reuse their inputs' memory in the
    backward pass, so that it runs once. A compiler sees PyTorch's operations, of which it makes kernels itself."""

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return super().embedding(ids, weight)
        return embedding(ids, weight)

    def add_rms_norm(
        self, x: Tensor, delta: Tensor | None, gain: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling():
            return super().add_rms_norm(x, delta, gain, eps)
        device_type = x.device.type
        # Under autocast a matrix product reads the norm: it is written as the product wants it.
        dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype
        if delta is None:
            return x, rms_norm(x, gain, eps=eps, dtype=dtype)
        return add_rms_norm(x, delta, gain, eps=eps, dtype=dtype)

    def heads_norm(self, qkv: Tensor, q_norm: Any, k_norm: Any, kv_heads: int) -> Tensor:
        if torch.compiler.is_compiling():
            return super().heads_norm(qkv, q_norm, k_norm, kv_heads)
        return heads_norm(qkv, q_norm.weight, k_norm.weight, kv_heads, eps=q_norm.eps)

    def rotated(self, qkv: Tensor, cos_sin: Tensor, kv_heads: int, *, joined: bool) -> tuple[Tensor, ...]:
        if torch.compiler.is_compiling():
            return super().rotated(qkv, cos_sin, kv_heads, joined=joined)
        if cos_sin.dim() == 4 and len(cos_sin) == 1:
            cos_sin = cos_sin[0]  # the same positions in all rows
        # What follows hands back one gradient, new and read by nothing else.
        qkv = rope_(qkv, cos_sin, kv_heads, reuse_grad=True)
        return (qkv,) if joined else heads_of(qkv, kv_heads, 2 * cos_sin.shape[-2])

    def swiglu(self, joint: Tensor, *, casts: bool = False) -> Tensor:
        if torch.compiler.is_compiling():
            return super().swiglu(joint)
        casts = casts and joint.is_cuda and joint.dtype == torch.bfloat16 and torch.is_grad_enabled()
        return swiglu_and_cast(joint) if casts else swiglu(joint)

    def linear_cross_entropy(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, *, slice_loss: SliceGradient
    ) -> Tensor:
        if torch.compiler.is_compiling():
            return super().linear_cross_entropy(hidden, weight, targets, slice_loss=slice_loss)
        return linear_cross_entropy(hidden, weight, targets, chunk=tokens_per_slice(len(weight), "fused"))


def refuse_unsupported(weight: Tensor) -> None:
    """Raise UsageError unless the kernels run on the weight's device and in its dtype."""
    wrong = ""
    if weight.dtype not in DTYPES or not (weight.is_cuda or INTERPRETED):
        given = f"{str(weight.dtype).removeprefix('torch.')} on {weight.device.type}"
        wrong = f"runs in float32, float16 and bfloat16 on a CUDA device, not in {given}"
    elif weight.is_cuda and torch.cuda.get_device_capability(weight.device) < OLDEST:
        wrong = "needs Triton, which is for GPUs of compute capability 8.0 and more"
    if wrong:
        found = f'model.operations: "fused" {wrong}'
        raise UsageError("operations.unsupported", found, hint='use "auto" or "plain"')
