"""Tensors as the copy engine wants them: rank-4 descriptors over any strides it can take, and outputs in like order."""

from collections.abc import Sequence

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

ALIGNMENT_BYTES = 16  # of base addresses and strides, by the tensor memory accelerator
GLUON_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


def tma_strides(tensor: torch.Tensor) -> list[int] | None:
    """Strides for a descriptor of this (batch, heads, seq, head_dim) tensor; None where the copy engine cannot take them.

    A dimension of size 1 may have any stride, also an unaligned one: it is replaced, no address depends on it.
    """
    per_unit = ALIGNMENT_BYTES // tensor.element_size()
    if tensor.stride(-1) != 1 or tensor.data_ptr() % ALIGNMENT_BYTES:
        return None
    strides = [
        tensor.shape[-1] if size == 1 else stride
        for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    ]
    if any(stride % per_unit or stride <= 0 for stride in strides):
        return None
    return [*strides, 1]


def describe(tensor: torch.Tensor, box: Sequence[int]) -> TensorDescriptor:
    """A descriptor that copies boxes of this shape, swizzled as the tensor cores read them."""
    strides = tma_strides(tensor) if tensor.ndim == 4 else list(tensor.stride())
    layout = gl.NVMMASharedLayout.get_default_for(list(box), GLUON_DTYPES[tensor.dtype])
    return TensorDescriptor(tensor, list(tensor.shape), strides, list(box), layout)


def empty_in_order_of(tensor: torch.Tensor) -> torch.Tensor:
    """An uninitialised dense tensor of the same shape, its memory in (batch, seq, heads, head_dim) order if that is how the
    given one lies (a slice of a fused projection does), else in (batch, heads, seq, head_dim) order."""
    batch, heads, length, head_dim = tensor.shape
    if tensor.stride(1) < tensor.stride(2):
        return tensor.new_empty((batch, length, heads, head_dim)).transpose(1, 2)
    return tensor.new_empty((batch, heads, length, head_dim))
