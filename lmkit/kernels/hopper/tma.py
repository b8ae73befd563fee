"""Copy boxes between global and shared memory with TMA, Hopper's tensor memory accelerator.

Tensors are (batch, heads, sequence, head_dim), copied in boxes of (1, 1, rows, D). Elements of a box that lie
outside of the tensor, rows past its end and columns past its head_dim, read as zeros and are not written. A `full`
mbarrier has one arrival a phase, the `expect` here: the phase completes when the announced bytes, those of a whole
box, have landed.
"""

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lmkit.kernels.hopper.barriers import partition_barrier
from lmkit.kernels.versions import gluon_operations

tma_load = gluon_operations().tma_load
tma_store = gluon_operations().tma_store
tma_add = gluon_operations().tma_add

ALIGNMENT_BYTES = 16  # of base addresses and strides
GLUON_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


@functools.lru_cache(maxsize=1024)
def tma_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], element_size: int
) -> tuple[int, ...] | None:
    """Return the strides that TMA gets for a (batch, heads, seq, head_dim) tensor, or None if it cannot take them. In
    a dimension of size 1 no address depends on the stride: it is replaced by an aligned one."""
    unit = ALIGNMENT_BYTES // element_size
    outer = [stride if size > 1 else unit for size, stride in zip(shape[:3], strides[:3], strict=True)]
    if strides[3] != 1 or any(stride % unit or stride <= 0 for stride in outer):
        return None
    return (*outer, 1)


def suits_tma(tensor: torch.Tensor) -> bool:
    """Return whether TMA can copy boxes of this (batch, heads, seq, head_dim) tensor."""
    return (
        not tensor.data_ptr() % ALIGNMENT_BYTES
        and tma_strides(tensor.shape, tensor.stride(), tensor.element_size()) is not None
    )


def head_boxes(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, rows: int, width: int
) -> TensorDescriptor:
    """Describe a (batch, heads, seq, head_dim) tensor that is copied in boxes of `rows` rows of a head and `width`
    columns, at least head_dim. The base is empty: a prepared launch fills in the pointer."""
    suitable = tma_strides(shape, strides, dtype.itemsize)
    assert suitable is not None, f"TMA cannot take strides {strides}"
    return _boxes(shape, suitable, dtype, (1, 1, rows, width))


def flat_boxes(shape: tuple[int, ...], box: tuple[int, ...]) -> TensorDescriptor:
    """Describe a dense float32 tensor that is copied in boxes of this shape."""
    return _boxes(shape, torch.empty(shape, device="meta").stride(), torch.float32, box)


def _boxes(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, box: tuple[int, ...]
) -> TensorDescriptor:
    base = torch.empty((0,) * len(shape), dtype=dtype)
    return TensorDescriptor(base, list(shape), list(strides), list(box), shared_layout(box, dtype))


@functools.lru_cache(maxsize=64)
def shared_layout(box: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Return how a box lies in shared memory: swizzled as wgmma reads it."""
    return gl.NVMMASharedLayout.get_default_for(list(box), GLUON_DTYPES[dtype])


@gluon.jit
def allocate_slots(desc, COUNT: gl.constexpr):
    """Return shared memory for COUNT boxes of this descriptor, (COUNT, *box)."""
    shape: gl.constexpr = [COUNT] + desc.block_type.shape  # noqa: RUF005 (Gluon knows no stars)
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon.jit
def allocate_tile(desc):
    """Return shared memory for one box of this descriptor."""
    return gl.allocate_shared_memory(desc.dtype, desc.block_type.shape, desc.layout)


@gluon.jit
def fetch_tile(desc, batch, head, row, full, tiles, slot):
    """Start to load the box at `row` into a slot of `tiles`."""
    mbarrier.expect(full.index(slot), desc.block_type.nbytes)
    tma_load(desc, [batch, head, row, 0], full.index(slot), tiles.index(slot))


@gluon.jit
def fetch_rows(desc, batch, head, row, tiles, vector_desc, first, vectors, full, slot):
    """Start to load the box at `row` into a slot of `tiles`, and a float32 number for each of its rows, from number
    `first` on, into the same slot of `vectors`: lse with Q, delta with dO."""
    mbarrier.expect(full.index(slot), desc.block_type.nbytes + vector_desc.block_type.nbytes)
    tma_load(desc, [batch, head, row, 0], full.index(slot), tiles.index(slot))
    tma_load(vector_desc, [first], full.index(slot), vectors.index(slot))


@gluon.jit
def send_through(tile, values, desc, batch, head, place):
    """Write `values`, (rows, D), to box number `place` along the sequence, through `tile`, which nobody reads any
    more. All warps of the partition call this; it returns when TMA has read the tile."""
    rows: gl.constexpr = values.shape[0]
    tile.reshape([rows, values.shape[1]]).store(values)
    fence_async_shared()
    partition_barrier()
    tma_store(desc, [batch, head, place * rows, 0], tile)
    tma.store_wait(0)
