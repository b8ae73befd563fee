"""Loading and storing tiles of (batch, heads, seq, head_dim) tensors, for every kernel of this package.

A tile is a block of rows of one head. Rows come either through pointers (any strides) or through a tensor
descriptor, where Hopper's copy engine (TMA) fetches whole tiles and fills what lies outside with zeros.

A head_dim that is no power of two is either padded to the next one or split in two parts, MAIN + REST (80 = 64 +
16, 96 = 64 + 32): the products of the parts add up, and nothing is multiplied by padding. REST = 0 means that
there is one part; the second operand of the two-part helpers is then ignored.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)  # exp(x) = 2^(x * LOG2_E)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def head_start(pointer, batch, head, stride_batch, stride_head):
    """The address of one head's first row. 64 bits: batch * heads * seq * head_dim passes 2^31."""
    return pointer + batch.to(tl.int64) * stride_batch + head.to(tl.int64) * stride_head


@triton.jit
def load_tile(
    source,  # pointer to the head's first row, or a tensor descriptor of the whole tensor
    stride_row,
    batch,
    head,
    row,
    num_rows,
    ROWS: tl.constexpr,
    FIRST: tl.constexpr,  # first column
    WIDTH: tl.constexpr,  # columns of the tile, a power of two
    HEAD_DIM: tl.constexpr,
    GUARD_ROWS: tl.constexpr,  # rows at and after num_rows exist in the tile and read as zeros
    DESCRIPTOR: tl.constexpr,
):
    """(ROWS, WIDTH) values from row `row` on."""
    if DESCRIPTOR:
        tile = source.load([batch, head, row, FIRST]).reshape(ROWS, WIDTH)
    else:
        rows = tl.arange(0, ROWS)
        columns = FIRST + tl.arange(0, WIDTH)
        start = source + tl.cast(row, tl.int64) * stride_row
        pointers = start + rows[:, None] * stride_row + columns[None, :]
        if FIRST + WIDTH > HEAD_DIM:
            inside = (columns < HEAD_DIM)[None, :]
            if GUARD_ROWS:
                inside = inside & (row + rows < num_rows)[:, None]
            tile = tl.load(pointers, mask=inside, other=0.0)
        elif GUARD_ROWS:
            tile = tl.load(pointers, mask=(row + rows < num_rows)[:, None], other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def store_tile(
    pointer,
    tile,
    stride_row,
    row,
    num_rows,
    ROWS: tl.constexpr,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Writes the rows before num_rows and the columns before HEAD_DIM of a (ROWS, WIDTH) tile."""
    rows = tl.arange(0, ROWS)
    columns = FIRST + tl.arange(0, WIDTH)
    start = pointer + tl.cast(row, tl.int64) * stride_row
    inside = (row + rows < num_rows)[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(
        start + rows[:, None] * stride_row + columns[None, :], tile.to(pointer.dtype.element_ty), mask=inside
    )


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
