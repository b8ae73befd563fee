"""Compute dK and dV, the gradients of keys and values, in portable Triton (FlashAttention-2); see `backward`.

One CTA owns a tile of keys of one key head and walks over the tiles of queries that see it, of all query heads of
the group one after the other: no two CTAs write to the same place. Under a causal mask it begins at the diagonal,
with the query tiles that the diagonal cuts, and goes on with those that see all of its keys. It works on transposed
scores, so that P^T and dS^T feed the next products from registers:

    P^T = exp(K Q^T * scale - lse)        dP^T = V dO^T        dS^T = P^T * (dP^T - delta)
    dV += P^T dO                          dK += dS^T Q

and scales dK once at the end. dK and dV stay in registers, in float32. Q and dO stream through shared memory,
`stages` tiles of each in flight; K and V lie there too, unless they are read from registers. Triton places the
barriers. Where registers do not suffice for both sums (a tiling with `apart`), the kernel runs twice, once OF_KEYS
and once OF_VALUES.
"""

import triton
import triton.language as tl
from torch import Tensor

from lmkit.kernels.flash import tiles
from lmkit.kernels.flash.tiles import LOG2_E
from lmkit.kernels.flash.tuning import Tiling, prepare_tiled, prepare_tuned
from lmkit.kernels.launch import Start


def prepare_dkdv(tensors: tuple[Tensor, ...], options: tuple) -> Start:
    """Return what computes dk and dv in calls of this kind, from the pointers of the ten tensors."""
    causal, scale, precision, tiling, has_first = options

    def prepare_sums(tiling: Tiling, of_keys: bool, of_values: bool) -> Start:
        tile_rows = {0: tiling.rows, 1: tiling.columns, 2: tiling.columns, 3: tiling.rows}
        constants = {"CAUSAL": causal, "PRECISION": precision, "OF_KEYS": of_keys, "OF_VALUES": of_values}
        constants["FIRST"] = has_first
        scales = (scale, scale * LOG2_E.value)
        return prepare_tiled(dkdv_kernel, tensors, tile_rows, scales, tiling, constants, by_keys=True)

    def prepare(tiling: Tiling) -> Start:
        if not tiling.apart:
            return prepare_sums(tiling, True, True)
        sum_keys, sum_values = prepare_sums(tiling, True, False), prepare_sums(tiling, False, True)

        def start(*pointers: int) -> None:
            sum_keys(*pointers)
            sum_values(*pointers)

        return start

    return prepare_tuned("dkdv", prepare, tensors, tensors[:4], (causal, precision, tiling))


@triton.jit(do_not_specialize=["kv_heads"])  # one compilation, however many heads
def dkdv_kernel(
    q_source, k_source, v_source, dout_source,  # pointers, or TMA descriptors
    lse_pointer,
    delta_pointer,  # written by dq_kernel
    dk_pointer, dv_pointer,
    first_pointer, last_pointer,  # read only with FIRST; the last query that sees each key, (batch, num_keys) int32
    q_stride_batch, q_stride_head, q_stride_row,
    k_stride_batch, k_stride_head, k_stride_row,
    v_stride_batch, v_stride_head, v_stride_row,
    dout_stride_batch, dout_stride_head, dout_stride_row,
    dk_stride_batch, dk_stride_head, dk_stride_row,
    dv_stride_batch, dv_stride_head, dv_stride_row,
    kv_heads,
    group,  # query heads to a key head
    num_queries, num_keys,
    scale,
    scale_log2,  # scale * log2(e)
    HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,  # see `tiles`
    ROWS: tl.constexpr,  # queries of a tile
    COLUMNS: tl.constexpr,  # keys of a tile
    CAUSAL: tl.constexpr,
    OF_KEYS: tl.constexpr,  # sum dK
    OF_VALUES: tl.constexpr,  # sum dV
    FIRST: tl.constexpr,  # queries see no key before their `first`
    PRECISION: tl.constexpr,
    REGISTERS: tl.constexpr,  # k and v are read from registers (see `in_registers`)
):  # fmt: skip
    num_tiles = tl.cdiv(num_keys, COLUMNS)
    tile = tl.program_id(0) % num_tiles  # longest first: under a causal mask most queries see the first keys
    batch_head = tl.program_id(0) // num_tiles
    batch, kv_head = batch_head // kv_heads, batch_head % kv_heads
    column = tile * COLUMNS
    k_view = tiles.view_head(k_source, k_stride_batch, k_stride_head, k_stride_row, batch, kv_head, num_keys)
    v_view = tiles.view_head(v_source, v_stride_batch, v_stride_head, v_stride_row, batch, kv_head, num_keys)
    dk_view = tiles.view_head(
        dk_pointer, dk_stride_batch, dk_stride_head, dk_stride_row, batch, kv_head, num_keys
    )
    dv_view = tiles.view_head(
        dv_pointer, dv_stride_batch, dv_stride_head, dv_stride_row, batch, kv_head, num_keys
    )

    k = tiles.load_main(k_view, column, COLUMNS, MAIN, HEAD_DIM, True)  # (COLUMNS, MAIN)
    v = tiles.load_main(v_view, column, COLUMNS, MAIN, HEAD_DIM, True)  # (COLUMNS, MAIN)
    k_rest = tiles.load_rest(k_view, column, COLUMNS, MAIN, REST, HEAD_DIM, True, k)  # (COLUMNS, REST)
    v_rest = tiles.load_rest(v_view, column, COLUMNS, MAIN, REST, HEAD_DIM, True, v)  # (COLUMNS, REST)
    if REGISTERS:
        k = tiles.in_registers(k, column, num_keys, COLUMNS)
        v = tiles.in_registers(v, column, num_keys, COLUMNS)

    dk = tl.zeros((COLUMNS, MAIN), tl.float32)
    dv = tl.zeros((COLUMNS, MAIN), tl.float32)
    dk_rest = tiles.zeros_of_rest(COLUMNS, REST)
    dv_rest = tiles.zeros_of_rest(COLUMNS, REST)

    # Queries before `begin` see none of these keys; from `whole` on they see all of them.
    begin = 0
    whole = 0
    if CAUSAL:
        whole = tl.minimum(tl.cdiv(column + COLUMNS - 1, ROWS) * ROWS, tl.cdiv(num_queries, ROWS) * ROWS)
        if CAUSAL != tiles.NO_SKIP:
            begin = column // ROWS * ROWS
    # With `first`: queries from `cut` on do not see all of them, those from `end` on none.
    cut = num_queries
    end = num_queries
    of_batch = first_pointer
    if FIRST:
        of_batch = first_pointer + batch.to(tl.int64) * num_queries
        of_keys = last_pointer + batch.to(tl.int64) * num_keys
        end = tl.load(of_keys + tl.minimum(column + COLUMNS, num_keys) - 1) + 1
        cut = tl.maximum((tl.load(of_keys + column) + 1) // ROWS * ROWS, whole)
        whole = tl.minimum(whole, tl.cdiv(end, ROWS) * ROWS)
        cut = tl.minimum(cut, tl.cdiv(end, ROWS) * ROWS)
    for member in range(group):
        head = kv_head * group + member
        # where this head's lse and delta begin
        statistics = (batch.to(tl.int64) * kv_heads * group + head) * num_queries
        q_view = tiles.view_head(
            q_source, q_stride_batch, q_stride_head, q_stride_row, batch, head, num_queries
        )
        dout_view = tiles.view_head(
            dout_source, dout_stride_batch, dout_stride_head, dout_stride_row, batch, head, num_queries
        )
        if CAUSAL:
            dk, dk_rest, dv, dv_rest = walk_over_queries(
                dk, dk_rest, dv, dv_rest, k, k_rest, v, v_rest, q_view, dout_view,
                lse_pointer + statistics, delta_pointer + statistics, of_batch, column, begin, whole,
                scale_log2, HEAD_DIM, MAIN, REST, ROWS, COLUMNS, True, OF_KEYS, OF_VALUES, FIRST, PRECISION,
            )  # fmt: skip
        dk, dk_rest, dv, dv_rest = walk_over_queries(
            dk, dk_rest, dv, dv_rest, k, k_rest, v, v_rest, q_view, dout_view,
            lse_pointer + statistics, delta_pointer + statistics, of_batch, column, whole, cut,
            scale_log2, HEAD_DIM, MAIN, REST, ROWS, COLUMNS, False, OF_KEYS, OF_VALUES, FIRST, PRECISION,
        )  # fmt: skip
        if FIRST:
            dk, dk_rest, dv, dv_rest = walk_over_queries(
                dk, dk_rest, dv, dv_rest, k, k_rest, v, v_rest, q_view, dout_view,
                lse_pointer + statistics, delta_pointer + statistics, of_batch, column, cut, end,
                scale_log2, HEAD_DIM, MAIN, REST, ROWS, COLUMNS, True, OF_KEYS, OF_VALUES, FIRST, PRECISION,
            )  # fmt: skip

    if OF_KEYS:
        tiles.store_main(dk_view, dk * scale, column, COLUMNS, MAIN, HEAD_DIM)
        tiles.store_rest(dk_view, dk_rest * scale, column, COLUMNS, MAIN, REST, HEAD_DIM)
    if OF_VALUES:
        tiles.store_main(dv_view, dv, column, COLUMNS, MAIN, HEAD_DIM)
        tiles.store_rest(dv_view, dv_rest, column, COLUMNS, MAIN, REST, HEAD_DIM)


@triton.jit
def walk_over_queries(
    dk, dk_rest,  # (COLUMNS, MAIN), (COLUMNS, REST): sum of dS^T Q
    dv, dv_rest,  # the same of P^T dO
    k, k_rest, v, v_rest, q_view, dout_view,
    lse_pointer, delta_pointer,  # of this head
    first_pointer,  # of this batch; read only with FIRST
    column,
    begin, end,  # queries from `begin`, a multiple of ROWS, up to `end`
    scale_log2,
    HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    MASKED: tl.constexpr,  # these tiles are cut by the diagonal or by `first`
    OF_KEYS: tl.constexpr, OF_VALUES: tl.constexpr,
    FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what these queries give to (dk, dk_rest, dv, dv_rest), dk not yet scaled."""
    num_queries = q_view.length
    columns = column + tl.arange(0, COLUMNS)
    for row in range(begin, end, ROWS):
        row = tl.multiple_of(row, ROWS)
        q = tiles.load_main(q_view, row, ROWS, MAIN, HEAD_DIM, True)  # (ROWS, MAIN)
        dout = tiles.load_main(dout_view, row, ROWS, MAIN, HEAD_DIM, True)  # (ROWS, MAIN)
        q_rest = tiles.load_rest(q_view, row, ROWS, MAIN, REST, HEAD_DIM, True, q)  # (ROWS, REST)
        dout_rest = tiles.load_rest(dout_view, row, ROWS, MAIN, REST, HEAD_DIM, True, dout)  # (ROWS, REST)
        rows = row + tl.arange(0, ROWS)
        # Rows past the end get lse = infinity, which makes p = 0: they need no other mask.
        lse_log2 = tl.load(lse_pointer + rows, mask=rows < num_queries, other=float("inf")) * LOG2_E
        delta = tl.load(delta_pointer + rows, mask=rows < num_queries, other=0.0)

        scores = tiles.dot_over_parts(k, k_rest, q, q_rest, REST, PRECISION)  # (COLUMNS, ROWS), transposed
        if OF_KEYS:
            # (COLUMNS, ROWS), transposed
            dp = tiles.dot_over_parts(v, v_rest, dout, dout_rest, REST, PRECISION)
        p = tl.exp2(scores * scale_log2 - lse_log2[None, :])
        if MASKED:
            p = tl.where(rows[None, :] >= columns[:, None], p, 0.0)
            if FIRST:
                first = tl.load(first_pointer + rows, mask=rows < num_queries, other=0)
                p = tl.where(columns[:, None] >= first[None, :], p, 0.0)
        if OF_VALUES:
            p_low = p.to(dout.dtype)
            dv = tl.dot(p_low, dout, dv, input_precision=PRECISION)
            if REST > 0:
                dv_rest = tl.dot(p_low, dout_rest, dv_rest, input_precision=PRECISION)
        if OF_KEYS:
            ds = (p * (dp - delta[None, :])).to(q.dtype)  # (COLUMNS, ROWS), transposed
            dk = tl.dot(ds, q, dk, input_precision=PRECISION)
            if REST > 0:
                dk_rest = tl.dot(ds, q_rest, dk_rest, input_precision=PRECISION)
    return dk, dk_rest, dv, dv_rest
