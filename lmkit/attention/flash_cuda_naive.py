"""Attention in CUDA C++ with a thread for each row: the kernel from which `flash_cuda` is explained."""

from torch import Tensor

from lmkit.attention.flash_cuda import check as check
from lmkit.attention.flash_cuda import run
from lmkit.registry import ATTENTION


@ATTENTION.register("flash_cuda_naive", order=7, requires=("triton",), devices=("cuda",), check="check")
def flash_cuda_naive(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None) -> Tensor:
    """Compute exact attention, slowly. Supports what `flash_cuda` does.

    See `lmkit.attention` for shapes and conventions, lmkit/kernels/cuda/README.md for the way from here to
    `flash_cuda`.
    """
    return run(q, k, v, causal, scale, naive=True)
