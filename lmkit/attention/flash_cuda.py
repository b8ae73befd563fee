"""FlashAttention in CUDA C++: checks, gradients and torch.compile around the kernels of `lmkit.kernels.cuda`.

Forward and backward are custom operators, eagerly as well: opaque to torch.compile, which does not break the graph.
"""

from typing import Any

import torch
from torch import Tensor

from lmkit.core.attention import SECOND_DERIVATIVES, prepare_inputs, zeros_like_queries
from lmkit.core.autograd import differentiable_once
from lmkit.errors import UsageError
from lmkit.kernels.cuda.build import nvcc
from lmkit.kernels.cuda.flash import flash_backward, flash_forward
from lmkit.kernels.operators import attention_gradient_shapes, attention_shapes, define
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
    if q.numel() == 0 or k.numel() == 0:
        return zeros_like_queries(q, k, v)
    if scale <= 0:
        q, scale = q * scale, 1.0  # the kernels take the maximum before they scale
    out: Tensor = forward_operator(q, k, v, causal, scale, naive, build)[0]
    return out


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


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    causal, scale, naive, build = options
    return flash_backward(dout, q, k, v, out, lse, causal=causal, scale=scale, naive=naive, build=build)


_LIBRARY = torch.library.Library("lmkit", "FRAGMENT")
_OPTIONS = "bool causal, float scale, bool naive, str build"
forward_operator = define(
    _LIBRARY,
    f"flash_cuda_forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)",
    forward,
    attention_shapes,
)
backward_operator = define(
    _LIBRARY,
    "flash_cuda_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    backward,
    attention_gradient_shapes,
)


def save_for_backward(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    """Keep q, k, v, out, the log-sum-exp and the options."""
    q, k, v, *ctx.options = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)  # or autograd would allocate zeros as the gradient of lse
    ctx.save_for_backward(q, k, v, out, lse)


@differentiable_once("flash_cuda", instead=SECOND_DERIVATIVES)
def backward_of_operator(ctx: Any, saved: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    return *backward_operator(grads[0], *saved, *ctx.options), *[None] * len(ctx.options)


torch.library.register_autograd(
    "lmkit::flash_cuda_forward", backward_of_operator, setup_context=save_for_backward, lib=_LIBRARY
)
