"""What the kernels that own a tile of queries (`flash_forward`, `flash_query_gradient`) have in common: which tile
a program owns, which keys the tile sees, and the mask where it sees only some.
"""

import triton
import triton.language as tl


@triton.jit
def locate_query_tile(heads, group, num_queries, ROWS: tl.constexpr, CAUSAL: tl.constexpr):
    """(first query, batch * heads + head, batch, head, key head) of this program's tile."""
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
    """(whole, end): keys before `whole` are seen by every query of the tile at `row`, keys from `end` on by none.

    `whole` is a multiple of COLUMNS: up to there tiles of keys need no mask.
    """
    end = num_keys
    whole = num_keys // COLUMNS * COLUMNS
    if CAUSAL:
        end = tl.minimum(num_keys, row + ROWS)
        whole = tl.minimum(whole, (row + 1) // COLUMNS * COLUMNS)
    return whole, end


@triton.jit
def visible_keys(rows, column, num_keys, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr):
    """True where a query of `rows` sees a key of the tile at `column`.

    (ROWS, COLUMNS); without a causal mask (1, COLUMNS): all queries see the same keys.
    """
    columns = column + tl.arange(0, COLUMNS)
    visible = (columns < num_keys)[None, :]
    if CAUSAL:
        visible = visible & (rows[:, None] >= columns[None, :])
    return visible
