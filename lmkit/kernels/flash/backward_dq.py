"""Compute dQ, the gradient of the queries, in portable Triton (FlashAttention-2); see `backward` for the whole.

One CTA owns a tile of queries and walks over the tiles of keys that it sees, as the forward pass does: first those
that every query sees, then those that the diagonal or the end of the keys cuts. For every key tile it computes

    P = exp(Q K^T * scale - lse)        dP = dO V^T        dS = P * (dP - delta)        dQ += dS K

and scales dQ once at the end. lse comes from the forward pass, so there is no running maximum and nothing to correct
afterwards. Before the walk the CTA computes delta = rowsum(dO * O), for itself and for `backward_dkdv`, which runs
next.

dQ stays in registers, in float32. K and V stream through shared memory, `stages` tiles of each in flight; Q and dO
lie there too, unless they are read from registers. Triton places the barriers.
"""

import triton
import triton.language as tl
from torch import Tensor

from lmkit.kernels.flash import tiles
from lmkit.kernels.flash.tiles import LOG2_E
from lmkit.kernels.flash.tuning import Tiling, prepare_tiled, prepare_tuned
from lmkit.kernels.launch import Start


def prepare_dq(tensors: tuple[Tensor, ...], options: tuple) -> Start:
    """Return what computes delta and dq in calls of this kind, from the pointers of the nine tensors."""
    q, k, v, _, dout, *_ = tensors
    causal, scale, precision, tiling, has_first = options

    def prepare(tiling: Tiling) -> Start:
        tile_rows = {0: tiling.rows, 1: tiling.columns, 2: tiling.columns, 4: tiling.rows}
        cut = causal or k.shape[2] % tiling.columns != 0
        constants = {"CAUSAL": causal, "PRECISION": precision, "CUT": cut, "FIRST": has_first}
        scales = (scale, scale * LOG2_E.value)
        return prepare_tiled(dq_kernel, tensors, tile_rows, scales, tiling, constants)

    return prepare_tuned("dq", prepare, tensors, (q, k, v, dout), (causal, precision, tiling))


@triton.jit(do_not_specialize=["heads"])  # one compilation, however many heads
def dq_kernel(
    q_source, k_source, v_source,  # pointers, or TMA descriptors
    out_pointer,
    dout_source,  # as q_source
    lse_pointer,
    delta_pointer,  # written here, read by dkdv_kernel
    dq_pointer,
    first_pointer,  # read only with FIRST
    q_stride_batch, q_stride_head, q_stride_row,
    k_stride_batch, k_stride_head, k_stride_row,
    v_stride_batch, v_stride_head, v_stride_row,
    out_stride_batch, out_stride_head, out_stride_row,
    dout_stride_batch, dout_stride_head, dout_stride_row,
    dq_stride_batch, dq_stride_head, dq_stride_row,
    heads,
    group,  # query heads to a key head
    num_queries, num_keys,
    scale,
    scale_log2,  # scale * log2(e)
    HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,  # see `tiles`
    ROWS: tl.constexpr,  # queries of a tile
    COLUMNS: tl.constexpr,  # keys of a tile
    CAUSAL: tl.constexpr,
    CUT: tl.constexpr,  # some tiles are cut by the diagonal or by the end of the keys
    FIRST: tl.constexpr,  # queries see no key before their `first`
    PRECISION: tl.constexpr,
    REGISTERS: tl.constexpr,  # q and dout are read from registers (see `in_registers`)
):  # fmt: skip
    row, batch_head, batch, head, kv_head = tiles.locate_query_tile(heads, group, num_queries, ROWS, CAUSAL)
    q_view = tiles.view_head(q_source, q_stride_batch, q_stride_head, q_stride_row, batch, head, num_queries)
    k_view = tiles.view_head(k_source, k_stride_batch, k_stride_head, k_stride_row, batch, kv_head, num_keys)
    v_view = tiles.view_head(v_source, v_stride_batch, v_stride_head, v_stride_row, batch, kv_head, num_keys)
    dout_view = tiles.view_head(
        dout_source, dout_stride_batch, dout_stride_head, dout_stride_row, batch, head, num_queries
    )
    out_view = tiles.view_head(
        out_pointer, out_stride_batch, out_stride_head, out_stride_row, batch, head, num_queries
    )
    dq_view = tiles.view_head(
        dq_pointer, dq_stride_batch, dq_stride_head, dq_stride_row, batch, head, num_queries
    )

    # delta = rowsum(dO * O)
    dout = tiles.load_main(dout_view, row, ROWS, MAIN, HEAD_DIM, True)  # (ROWS, MAIN)
    out = tiles.load_main(out_view, row, ROWS, MAIN, HEAD_DIM, True)  # (ROWS, MAIN)
    delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1)  # (ROWS,)
    dout_rest = tiles.load_rest(dout_view, row, ROWS, MAIN, REST, HEAD_DIM, True, dout)  # (ROWS, REST)
    if REST > 0:
        out_rest = tiles.load_rest(out_view, row, ROWS, MAIN, REST, HEAD_DIM, True, out)  # (ROWS, REST)
        delta += tl.sum(dout_rest.to(tl.float32) * out_rest.to(tl.float32), 1)
    rows = row + tl.arange(0, ROWS)
    statistics = batch_head.to(tl.int64) * num_queries  # where this head's lse and delta begin
    tl.store(delta_pointer + statistics + rows, delta, mask=rows < num_queries)
    # Rows past the end get lse = infinity, which makes p = 0: they need no other mask.
    lse_log2 = tl.load(lse_pointer + statistics + rows, mask=rows < num_queries, other=float("inf")) * LOG2_E

    q = tiles.load_main(q_view, row, ROWS, MAIN, HEAD_DIM, True)  # (ROWS, MAIN)
    q_rest = tiles.load_rest(q_view, row, ROWS, MAIN, REST, HEAD_DIM, True, q)  # (ROWS, REST)
    if REGISTERS:
        q = tiles.in_registers(q, row, num_queries, ROWS)
        dout = tiles.in_registers(dout, row, num_queries, ROWS)

    dq = tl.zeros((ROWS, MAIN), tl.float32)
    dq_rest = tiles.zeros_of_rest(ROWS, REST)

    whole, end = tiles.bound_keys(row, num_keys, ROWS, COLUMNS, CAUSAL)
    begin = 0
    first = 0
    if FIRST:
        begin, clear, whole = tiles.bound_first(first_pointer, batch, row, num_queries, whole, ROWS, COLUMNS)
        first = tiles.load_first(first_pointer, batch, rows, num_queries)
        dq, dq_rest = walk_over_keys(
            dq, dq_rest, q, q_rest, dout, dout_rest, lse_log2, delta, k_view, v_view, row, first, begin, clear,
            scale_log2, HEAD_DIM, MAIN, REST, ROWS, COLUMNS, CAUSAL, True, FIRST, PRECISION,
        )  # fmt: skip
        begin = clear
    dq, dq_rest = walk_over_keys(
        dq, dq_rest, q, q_rest, dout, dout_rest, lse_log2, delta, k_view, v_view, row, first, begin, whole,
        scale_log2, HEAD_DIM, MAIN, REST, ROWS, COLUMNS, CAUSAL, False, FIRST, PRECISION,
    )  # fmt: skip
    if CUT:
        dq, dq_rest = walk_over_keys(
            dq, dq_rest, q, q_rest, dout, dout_rest, lse_log2, delta, k_view, v_view, row, first, whole, end,
            scale_log2, HEAD_DIM, MAIN, REST, ROWS, COLUMNS, CAUSAL, True, FIRST, PRECISION,
        )  # fmt: skip

    tiles.store_main(dq_view, dq * scale, row, ROWS, MAIN, HEAD_DIM)
    tiles.store_rest(dq_view, dq_rest * scale, row, ROWS, MAIN, REST, HEAD_DIM)


@triton.jit
def walk_over_keys(
    dq, dq_rest,  # (ROWS, MAIN), (ROWS, REST): sum of dS K
    q, q_rest, dout, dout_rest,
    lse_log2, delta,  # (ROWS,)
    k_view, v_view, row,
    first,  # (ROWS,) the first key that each query sees; read only with FIRST
    begin, end,  # keys from `begin`, a multiple of COLUMNS, up to `end`
    scale_log2,
    HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,  # these tiles are cut by the diagonal, by `first` or by the end of the keys
    FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what these keys give to (dq, dq_rest), not yet scaled."""
    rows = row + tl.arange(0, ROWS)
    for column in range(begin, end, COLUMNS):
        column = tl.multiple_of(column, COLUMNS)
        k = tiles.load_main(k_view, column, COLUMNS, MAIN, HEAD_DIM, MASKED)  # (COLUMNS, MAIN)
        v = tiles.load_main(v_view, column, COLUMNS, MAIN, HEAD_DIM, MASKED)  # (COLUMNS, MAIN)
        k_rest = tiles.load_rest(k_view, column, COLUMNS, MAIN, REST, HEAD_DIM, MASKED, k)  # (COLUMNS, REST)
        v_rest = tiles.load_rest(v_view, column, COLUMNS, MAIN, REST, HEAD_DIM, MASKED, v)  # (COLUMNS, REST)
        scores = tiles.dot_over_parts(q, q_rest, k, k_rest, REST, PRECISION)  # (ROWS, COLUMNS)
        dp = tiles.dot_over_parts(dout, dout_rest, v, v_rest, REST, PRECISION)  # (ROWS, COLUMNS)
        p = tl.exp2(scores * scale_log2 - lse_log2[:, None])
        if MASKED:
            visible = tiles.visible_keys(rows, first, column, k_view.length, COLUMNS, CAUSAL, FIRST)
            p = tl.where(visible, p, 0.0)
        ds = (p * (dp - delta[:, None])).to(k.dtype)  # (ROWS, COLUMNS)
        dq = tl.dot(ds, k, dq, input_precision=PRECISION)
        if REST > 0:
            dq_rest = tl.dot(ds, k_rest, dq_rest, input_precision=PRECISION)
    return dq, dq_rest
