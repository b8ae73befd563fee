"""Loading and storing tiles of (batch, heads, seq, head_dim) tensors, for every kernel of this package.

A tile is a block of rows of one head. Rows come either through pointers (any strides) or through a tensor
descriptor, where Hopper's copy engine (TMA) fetches whole tiles and fills what lies outside with zeros. A kernel
makes a `HeadView` of each tensor once and loads all its tiles from that.

A head_dim that is no power of two is either padded to the next one or split in two parts, MAIN + REST (80 = 64 +
16, 96 = 64 + 32): the products of the parts add up, and nothing is multiplied by padding. So a tile is a pair, its
main part and its rest. REST = 0 means that there is one part; `load_rest` then hands out what it was given, and
nobody reads it.
"""

from typing import NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)  # exp(x) = 2^(x * LOG2_E)
LN_2 = tl.constexpr(0.6931471805599453)


class HeadView(NamedTuple):
    """One head of a tensor: the rows that tiles are loaded from or stored to."""

    source: tl.tensor  # pointer to the first row, or the descriptor of the whole tensor
    stride: tl.tensor  # from row to row, in elements
    batch: tl.tensor  # where a descriptor finds the head
    head: tl.tensor
    length: tl.tensor  # rows


@triton.jit
def view_head(source, stride_batch, stride_head, stride_row, batch, head, length):
    """The view of one head, from the tensor's pointer or descriptor. 64 bits: a tensor passes 2^31 elements."""
    if source.dtype.is_ptr():
        source = source + batch.to(tl.int64) * stride_batch + head.to(tl.int64) * stride_head
    return HeadView(source, stride_row, batch, head, length)


@triton.jit
def load_main(
    view, row, ROWS: tl.constexpr, MAIN: tl.constexpr, HEAD_DIM: tl.constexpr, GUARD_ROWS: tl.constexpr
):
    """(ROWS, MAIN): the first part of the tile of rows from `row` on.

    GUARD_ROWS: rows at and after the view's length exist in the tile and read as zeros. (Without, there are none.)
    """
    return _load(view, row, ROWS, 0, MAIN, HEAD_DIM, GUARD_ROWS)


@triton.jit
def load_rest(view, row, ROWS: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, HEAD_DIM: tl.constexpr,
              GUARD_ROWS: tl.constexpr, unused):  # fmt: skip
    """(ROWS, REST): the second part of that tile, or `unused` where there is none."""
    rest = unused
    if REST > 0:
        rest = _load(view, row, ROWS, MAIN, REST, HEAD_DIM, GUARD_ROWS)
    return rest


@triton.jit
def _load(view, row, ROWS: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr,
          GUARD_ROWS: tl.constexpr):  # fmt: skip
    """(ROWS, WIDTH) values from row `row` and column FIRST on; columns past HEAD_DIM read as zeros."""
    if not view.source.dtype.is_ptr():
        tile = view.source.load([view.batch, view.head, row, FIRST]).reshape(ROWS, WIDTH)
    else:
        rows = tl.arange(0, ROWS)
        columns = FIRST + tl.arange(0, WIDTH)
        start = view.source + tl.cast(row, tl.int64) * view.stride
        pointers = start + rows[:, None] * view.stride + columns[None, :]
        if FIRST + WIDTH > HEAD_DIM:
            inside = (columns < HEAD_DIM)[None, :]
            if GUARD_ROWS:
                inside = inside & (row + rows < view.length)[:, None]
            tile = tl.load(pointers, mask=inside, other=0.0)
        elif GUARD_ROWS:
            tile = tl.load(pointers, mask=(row + rows < view.length)[:, None], other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def store_main(view, tile, row, ROWS: tl.constexpr, MAIN: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Writes the first part of the tile of rows from `row` on."""
    _store(view, tile, row, ROWS, 0, MAIN, HEAD_DIM)


@triton.jit
def store_rest(
    view, tile, row, ROWS: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Writes the second part, if there is one."""
    if REST > 0:
        _store(view, tile, row, ROWS, MAIN, REST, HEAD_DIM)


@triton.jit
def _store(
    view, tile, row, ROWS: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Writes the rows before the view's length and the columns before HEAD_DIM of a (ROWS, WIDTH) tile."""
    rows = tl.arange(0, ROWS)
    columns = FIRST + tl.arange(0, WIDTH)
    start = view.source + tl.cast(row, tl.int64) * view.stride
    inside = (row + rows < view.length)[:, None] & (columns < HEAD_DIM)[None, :]
    pointers = start + rows[:, None] * view.stride + columns[None, :]
    tl.store(pointers, tile.to(view.source.dtype.element_ty), mask=inside)


@triton.jit
def zeros_of_rest(ROWS: tl.constexpr, REST: tl.constexpr):
    """(ROWS, REST) float32 zeros to add a second part up in; where there is none, something that nobody reads."""
    return tl.zeros((ROWS, REST if REST > 0 else 16), tl.float32)


@triton.jit
def dot_over_parts(a, a_rest, b, b_rest, REST: tl.constexpr, PRECISION: tl.constexpr):
    """a b^T over the head dimension, in float32."""
    product = tl.dot(a, tl.trans(b), input_precision=PRECISION)
    if REST > 0:
        product = tl.dot(a_rest, tl.trans(b_rest), product, input_precision=PRECISION)
    return product


@triton.jit
def in_registers(tile, row, num_rows, ROWS: tl.constexpr):
    """The tile again, but computed: that is how to say which memory a product's left operand comes from.

    Hopper's matrix instruction reads a loaded left operand from shared memory, a computed one from registers.
    In narrow tiles the bandwidth of shared memory is what limits.
    """
    return tl.where((row + tl.arange(0, ROWS) < num_rows)[:, None], tile, 0.0)
