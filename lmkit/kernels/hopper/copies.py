"""Tiles on their way between global and shared memory, by the copy engine (TMA).

Tensors are (batch, heads, sequence, head_dim), copied in boxes of (1, 1, rows, D); what lies outside of a tensor,
rows past its end and columns past its head_dim, reads as zeros and is not written. A `full` mbarrier has one
arrival a phase, the `expect` here: the phase completes when the bytes that it announces, a whole box's, have landed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from lmkit.kernels.hopper.versions import partition_barrier


@gluon.jit
def fetch_tile(desc, batch, head, row, full, tiles, slot):
    """Starts copying the box at `row` into a slot of `tiles`."""
    mbarrier.expect(full.index(slot), desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [batch, head, row, 0], full.index(slot), tiles.index(slot))


@gluon.jit
def fetch_rows(desc, batch, head, row, tiles, vector_desc, first, vectors, full, slot):
    """Starts copying the box at `row` into a slot of `tiles`, and one float32 number for each of its rows, from
    `first` on, into that slot of `vectors`: lse with Q, delta with dO."""
    mbarrier.expect(full.index(slot), desc.block_type.nbytes + vector_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [batch, head, row, 0], full.index(slot), tiles.index(slot))
    tma.async_copy_global_to_shared(vector_desc, [first], full.index(slot), vectors.index(slot))


@gluon.jit
def send_through(tile, values, desc, batch, head, place):
    """Writes `values`, (rows, D), to the box number `place` along the sequence through `tile`, which nobody reads any
    more. All warps of the partition call it; it returns when the tile has been read."""
    rows: gl.constexpr = values.shape[0]
    tile.reshape([rows, values.shape[1]]).store(values)
    fence_async_shared()
    partition_barrier()
    tma.async_copy_shared_to_global(desc, [batch, head, place * rows, 0], tile)
    tma.store_wait(0)
