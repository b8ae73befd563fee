"""FlashAttention in CUDA C++: checks, gradients and torch.compile around the kernels of `lmkit.kernels.cuda`.

Forward and backward are custom operators, eagerly as well: opaque to torch.compile, which does not break the graph.
"""

from typing import Any

import torch
from torch import Tensor

from lmkit.core.attention import prepare_inputs, reference, zeros_like_queries
from lmkit.core.autograd import is_transformed
from lmkit.errors import UsageError
from lmkit.kernels.cuda.flash import flash_backward, flash_forward, nvcc
from lmkit.kernels.operators import define_attention
from lmkit.registry import ATTENTION

LARGEST_HEAD_DIM = 128


@ATTENTION.register(
    "flash_cuda",
    order=6,
    requires=("triton",),
    devices=("cuda",),
    check="check",
    variants={
        "naive": {"naive": True},
        "sm_75": {"build": "PTX=75"},
        "step_1": {
            "build": "SWIZZLE=0,FORWARD_STAGES=1,BACKWARD_STAGES=1,BACKWARD_HELPERS=0,CAUSAL_SKIP=0,"
            "FORWARD_WARPS=8,FORWARD_BLOCKS=1,FORWARD_CTAS=1"
        },
        "step_2": {
            "build": "FORWARD_STAGES=1,BACKWARD_STAGES=1,BACKWARD_HELPERS=0,CAUSAL_SKIP=0,"
            "FORWARD_WARPS=8,FORWARD_BLOCKS=1,FORWARD_CTAS=1"
        },
        "step_3": {
            "build": "CAUSAL_SKIP=0,BACKWARD_HELPERS=0,FORWARD_WARPS=8,FORWARD_BLOCKS=1,FORWARD_CTAS=1"
        },
        "step_4": {"build": "BACKWARD_HELPERS=0,FORWARD_WARPS=8,FORWARD_BLOCKS=1,FORWARD_CTAS=1"},
        "lagging": {"build": "FORWARD_LAG=8"},
    },
)
def flash_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    naive: bool = False,
    build: str = "",
) -> Tensor:
    """Compute exact attention on tensor cores, in memory linear in the lengths; the backward pass is deterministic.

    The kernels are compiled on first use, which needs nvcc. See `lmkit.attention` for shapes and conventions.

    Args:
        naive: use the kernel with a thread for each row, from which the others are explained.
        build: macros that the kernels are compiled with, "SWIZZLE=0,FORWARD_KEYS=32", to measure what a step gives.

    Raises:
        UsageError: this head_dim, dtype or device is not supported, or nvcc is missing.
        LmkitError: nvcc failed.
    """
    q, k, v, scale = prepare_inputs(q, k, v, scale)
    refuse_unsupported(q)
    if is_transformed():
        return reference(q, k, v, causal=causal, scale=scale)
    if q.numel() == 0 or k.numel() == 0:
        return zeros_like_queries(q, k, v)
    if scale <= 0:
        q, scale = q * scale, 1.0  # the kernels take the maximum before they scale
    return operator(q, k, v, causal, scale, naive, build)[0]


def check(q: Tensor) -> None:
    """Raise UsageError unless the kernels support tensors like q and can be compiled here."""
    refuse_unsupported(q)
    nvcc()


def refuse_unsupported(q: Tensor) -> None:
    """Raise UsageError unless the kernels support q's dtype, head_dim and device."""
    head_dim, wrong = q.shape[3], ""
    if q.dtype not in (torch.float16, torch.bfloat16):
        wrong = f"{q.dtype} is not supported"
    elif head_dim % 8 or not 8 <= head_dim <= LARGEST_HEAD_DIM:
        wrong = f"head_dim {head_dim} is not supported"
    elif not q.is_cuda:
        wrong = f"device {q.device.type} is not supported"
    elif (needed := (7, 5) if q.dtype == torch.float16 else (8, 0)) > torch.cuda.get_device_capability(
        q.device
    ):
        wrong = f"{q.dtype} needs sm_{needed[0]}{needed[1]} or newer"
    if wrong:
        raise UsageError(
            "attention.unsupported",
            f"flash_cuda: {wrong}",
            hint=f"supported: head_dim 8, 16, ... {LARGEST_HEAD_DIM}; bfloat16 from sm_80 on, float16 from sm_75 on",
        )


def forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, naive: bool, build: str
) -> tuple[Tensor, Tensor]:
    return flash_forward(q, k, v, causal=causal, scale=scale, naive=naive, build=build)


def backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, causal, scale, naive, build = arguments
    return flash_backward(*tensors, causal=causal, scale=scale, naive=naive, build=build)


_LIBRARY = torch.library.Library("lmkit", "FRAGMENT")
_OPTIONS = "bool causal, float scale, bool naive, str build"
operator = define_attention(_LIBRARY, "flash_cuda", _OPTIONS, forward, backward)
