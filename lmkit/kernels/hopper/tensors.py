"""Tensors as the copy engine wants them: rank-4 boxes over any strides it can take, and outputs in like
order."""

import functools

import torch
from triton.experimental.gluon import language as gl

ALIGNMENT_BYTES = 16  # of base addresses and strides, by the tensor memory accelerator
GLUON_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


@functools.lru_cache(maxsize=1024)
def tma_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], element_size: int
) -> tuple[int, ...] | None:
    """Strides for boxes of a (batch, heads, seq, head_dim) tensor; None where the copy engine cannot take
    them.

    A dimension of size 1 may have any stride, also an unaligned one: it is replaced, no address depends on
    it. The base address is `suits_copy_engine`'s to check.
    """
    unit = ALIGNMENT_BYTES // element_size
    outer = [stride if size > 1 else unit for size, stride in zip(shape[:3], strides[:3], strict=True)]
    if strides[3] != 1 or any(stride % unit or stride <= 0 for stride in outer):
        return None
    return (*outer, 1)


def box_strides(shape: tuple[int, ...], strides: tuple[int, ...], element_size: int) -> tuple[int, ...]:
    """`tma_strides` of a tensor that is known to suit."""
    suitable = tma_strides(shape, strides, element_size)
    assert suitable is not None, f"strides {strides} do not suit"
    return suitable


def suits_copy_engine(tensor: torch.Tensor) -> bool:
    """Whether boxes of this (batch, heads, seq, head_dim) tensor can be copied."""
    return (
        not tensor.data_ptr() % ALIGNMENT_BYTES
        and tma_strides(tensor.shape, tensor.stride(), tensor.element_size()) is not None
    )


@functools.lru_cache(maxsize=64)
def shared_layout(box: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How a box of this shape lies in shared memory: swizzled as the tensor cores read it."""
    return gl.NVMMASharedLayout.get_default_for(list(box), GLUON_DTYPES[dtype])


def strides_in_order_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Dense strides for this shape in memory order (batch, seq, heads, head_dim) if that is how the given ones lie (a
    slice of a fused projection does), else in (batch, heads, seq, head_dim) order."""
    _, heads, length, head_dim = shape
    if strides[1] < strides[2]:
        return (length * heads * head_dim, head_dim, heads * head_dim, 1)
    return (heads * length * head_dim, length * head_dim, head_dim, 1)
