"""Tensors as the copy engine wants them: rank-4 descriptors over any strides it can take, and outputs in
like order."""

import functools

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

ALIGNMENT_BYTES = 16  # of base addresses and strides, by the tensor memory accelerator
GLUON_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


def tma_strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Strides for a descriptor of this (batch, heads, seq, head_dim) tensor; None where the copy engine
    cannot take them.

    A dimension of size 1 may have any stride, also an unaligned one: it is replaced, no address depends on
    it.
    """
    unit = ALIGNMENT_BYTES // tensor.element_size()
    batch, head, row, column = tensor.stride()
    if column != 1 or tensor.data_ptr() % ALIGNMENT_BYTES:
        return None
    shape = tensor.shape
    batch = batch if shape[0] > 1 else unit
    head = head if shape[1] > 1 else unit
    row = row if shape[2] > 1 else unit
    if batch % unit or head % unit or row % unit or min(batch, head, row) <= 0:
        return None
    return (batch, head, row, 1)


@functools.lru_cache(maxsize=64)
def shared_layout(box: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How a box of this shape lies in shared memory: swizzled as the tensor cores read it."""
    return gl.NVMMASharedLayout.get_default_for(list(box), GLUON_DTYPES[dtype])


def describe(tensor: torch.Tensor, box: tuple[int, ...]) -> TensorDescriptor:
    """A descriptor for copies of boxes of this shape, of a tensor whose strides suit (see tma_strides)."""
    # Made without its constructor: that checks once more what tma_strides has checked, 5 us a descriptor, 9
    # a backward
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    descriptor.base = tensor
    descriptor.shape = tensor.shape
    descriptor.strides = tma_strides(tensor) if tensor.ndim == 4 else tensor.stride()
    descriptor.block_shape = list(box)
    descriptor.layout = shared_layout(box, tensor.dtype)
    descriptor.padding = "zero"
    return descriptor


def empty_in_order_of(tensor: torch.Tensor) -> torch.Tensor:
    """An uninitialised dense tensor of the same shape, its memory in (batch, seq, heads, head_dim) order if
    that is how the given one lies (a slice of a fused projection does), else in (batch, heads, seq,
    head_dim) order."""
    batch, heads, length, head_dim = tensor.shape
    if tensor.stride(1) < tensor.stride(2):
        return tensor.new_empty((batch, length, heads, head_dim)).transpose(1, 2)
    return tensor.new_empty((batch, heads, length, head_dim))
