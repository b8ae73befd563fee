"""Load, store and multiply tiles of (batch, heads, seq, head_dim) tensors, for the portable kernels.

A tile is a block of rows of one head. Rows are loaded either through pointers (any strides) or through a tensor
descriptor, with which Hopper's TMA loads whole tiles and fills with zeros what lies outside of the tensor. A kernel
makes a `HeadView` of each tensor once and loads all its tiles from it.

A head_dim that is no power of two is either padded to the next one or split in two parts, MAIN + REST (80 = 64 + 16,
96 = 64 + 32): the products of the parts add up, and nothing is multiplied by padding. So a tile is a pair, its main
part and its rest. REST = 0 means that there is one part; then `load_rest` returns what it was given, which nobody
reads.
"""

from typing import NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)  # exp(x) = 2^(x * LOG2_E)
LN_2 = tl.constexpr(0.6931471805599453)
NO_SKIP = tl.constexpr(2)  # as CAUSAL: walk over the tiles past the diagonal, too, to measure what they cost


class HeadView(NamedTuple):
    """One head of a tensor: the rows that tiles are loaded from or stored to."""

    source: tl.tensor  # pointer to the first row, or the descriptor of the whole tensor
    stride: tl.tensor  # from row to row, in elements
    batch: tl.tensor  # which head a descriptor addresses
    head: tl.tensor
    length: tl.tensor  # rows


@triton.jit
def view_head(source, stride_batch, stride_head, stride_row, batch, head, length):
    """Return the view of one head, from the tensor's pointer or descriptor. Offsets have 64 bits."""
    if source.dtype.is_ptr():
        source = source + batch.to(tl.int64) * stride_batch + head.to(tl.int64) * stride_head
    return HeadView(source, stride_row, batch, head, length)


@triton.jit
def load_main(
    view, row, ROWS: tl.constexpr, MAIN: tl.constexpr, HEAD_DIM: tl.constexpr, GUARD_ROWS: tl.constexpr
):
    """Load the first part of the tile of rows from `row` on, (ROWS, MAIN). GUARD_ROWS: zeros past the end."""
    return _load(view, row, ROWS, 0, MAIN, HEAD_DIM, GUARD_ROWS)


@triton.jit
def load_rest(view, row, ROWS: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, HEAD_DIM: tl.constexpr,
              GUARD_ROWS: tl.constexpr, unused):  # fmt: skip
    """Load the second part of the tile, (ROWS, REST); return `unused` where there is none."""
    rest = unused
    if REST > 0:
        rest = _load(view, row, ROWS, MAIN, REST, HEAD_DIM, GUARD_ROWS)
    return rest


@triton.jit
def _load(view, row, ROWS: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr,
          GUARD_ROWS: tl.constexpr):  # fmt: skip
    """Load (ROWS, WIDTH) values from row `row` and column FIRST on; columns past HEAD_DIM read as zeros."""
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
    """Write the first part of the tile of rows from `row` on."""
    _store(view, tile, row, ROWS, 0, MAIN, HEAD_DIM)


@triton.jit
def store_rest(
    view, tile, row, ROWS: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Write the second part, if there is one."""
    if REST > 0:
        _store(view, tile, row, ROWS, MAIN, REST, HEAD_DIM)


@triton.jit
def _store(
    view, tile, row, ROWS: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Write the rows before the view's length and the columns before HEAD_DIM of a (ROWS, WIDTH) tile."""
    rows = tl.arange(0, ROWS)
    columns = FIRST + tl.arange(0, WIDTH)
    start = view.source + tl.cast(row, tl.int64) * view.stride
    inside = (row + rows < view.length)[:, None] & (columns < HEAD_DIM)[None, :]
    pointers = start + rows[:, None] * view.stride + columns[None, :]
    tl.store(pointers, tile.to(view.source.dtype.element_ty), mask=inside)


@triton.jit
def zeros_of_rest(ROWS: tl.constexpr, REST: tl.constexpr):
    """Return a (ROWS, REST) float32 accumulator of a second part, or a tensor that nobody reads."""
    return tl.zeros((ROWS, REST if REST > 0 else 16), tl.float32)


@triton.jit
def dot_over_parts(a, a_rest, b, b_rest, REST: tl.constexpr, PRECISION: tl.constexpr):
    """Return a b^T, summed over the head dimension in float32."""
    product = tl.dot(a, tl.trans(b), input_precision=PRECISION)
    if REST > 0:
        product = tl.dot(a_rest, tl.trans(b_rest), product, input_precision=PRECISION)
    return product


@triton.jit
def in_registers(tile, row, num_rows, ROWS: tl.constexpr):
    """Return the tile as a computed value, which makes it a left operand in registers.

    wgmma reads a loaded left operand from shared memory and a computed one from registers. With narrow tiles the
    bandwidth of shared memory is the limit.
    """
    return tl.where((row + tl.arange(0, ROWS) < num_rows)[:, None], tile, 0.0)


@triton.jit
def locate_query_tile(heads, group, num_queries, ROWS: tl.constexpr, CAUSAL: tl.constexpr):
    """Return (first query, batch * heads + head, batch, head, key head) of this CTA's tile."""
    num_tiles = tl.cdiv(num_queries, ROWS)
    tile = tl.program_id(0) % num_tiles
    batch_head = tl.program_id(0) // num_tiles
    batch, head = batch_head // heads, batch_head % heads
    kv_head = head // group
    if CAUSAL:
        tile = num_tiles - 1 - tile  # the longest first: the short ones fill the gaps at the end
    return tile * ROWS, batch_head, batch, head, kv_head


@triton.jit
def bound_keys(row, num_keys, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr):
    """Return (whole, end): every query of the tile at `row` sees the keys before `whole`, a multiple of COLUMNS, none
    those from `end` on."""
    end = num_keys
    whole = num_keys // COLUMNS * COLUMNS
    if CAUSAL:
        whole = tl.minimum(whole, (row + 1) // COLUMNS * COLUMNS)
        if CAUSAL != NO_SKIP:
            end = tl.minimum(num_keys, row + ROWS)
    return whole, end


@triton.jit
def bound_first(first_pointer, batch, row, num_queries, whole, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return (begin, clear, whole), multiples of COLUMNS in this order: the tile at `row` sees no key before `begin`;
    every query of it sees those from `clear` to `whole`. `whole`: of `bound_keys`; `first`: of `flash_forward`."""
    of_batch = first_pointer + batch.to(tl.int64) * num_queries
    begin = tl.load(of_batch + row) // COLUMNS * COLUMNS
    last = tl.load(of_batch + tl.minimum(row + ROWS, num_queries) - 1)
    whole = tl.maximum(whole, begin)
    clear = tl.minimum(tl.cdiv(last, COLUMNS) * COLUMNS, whole)
    return begin, clear, whole


@triton.jit
def load_first(first_pointer, batch, rows, num_queries):
    """Return the first key that each query of `rows` sees."""
    of_batch = first_pointer + batch.to(tl.int64) * num_queries
    return tl.load(of_batch + rows, mask=rows < num_queries, other=0)


@triton.jit
def visible_keys(
    rows, first, column, num_keys, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr, FIRST: tl.constexpr
):
    """Return where a query of `rows` sees a key of the tile at `column`: (ROWS, COLUMNS), or without a causal mask
    (1, COLUMNS)."""
    columns = column + tl.arange(0, COLUMNS)
    visible = (columns < num_keys)[None, :]
    if CAUSAL:
        visible = visible & (rows[:, None] >= columns[None, :])
    if FIRST:
        visible = visible & (columns[None, :] >= first[:, None])
    return visible
