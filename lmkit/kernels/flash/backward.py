"""Compute attention backward in portable Triton, deterministically, with two kernels.

With P = exp(S - lse) (FlashAttention-2, Dao 2023, algorithm 2):

    dV = P^T dO      dP = dO V^T      dS = P * (dP - delta)      dQ = dS K * scale      dK = dS^T Q * scale

`dq_kernel` sums dQ over the keys, `dkdv_kernel` sums dK and dV over the queries. Each sum is made by one CTA in a
fixed order: no atomics, the same bits every time. The price is computing S and dP twice: seven products instead of
five. `lmkit.core.attention.flash_torch` has the same formulas in PyTorch.

dQ. One CTA owns a tile of queries and walks over the tiles of keys that it sees, as the forward pass does, with lse
in place of a running maximum. Before the walk it computes delta = rowsum(dO * O), for itself and for `dkdv_kernel`,
which runs next.

dK and dV. One CTA owns a tile of keys of one key head and walks over the tiles of queries that see it, of all query
heads of the group one after the other: no two CTAs write to the same place. Under a causal mask it begins at the
diagonal, with the query tiles that the diagonal cuts, and goes on with those that see all of its keys. It works on
transposed scores, so that P^T and dS^T feed the next products from registers. Where registers do not suffice for
both sums (a tiling with `apart`), the kernel runs twice, once OF_KEYS and once OF_VALUES.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmkit.kernels.flash import tiles
from lmkit.kernels.flash.tiles import LOG2_E
from lmkit.kernels.flash.tuning import Tiling, prepare_tiled, prepare_tuned
from lmkit.kernels.launch import Launch, LaunchCache, Start, calls_of, count_tiles, empty_in_order_of

KEYS_AT_ONCE = 128  # of a program that searches last queries
PARTS = 16  # of what a step of the search has left, of which it finds the right one


def flash_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float,
    precision: str = "ieee",
    dq_tiling: Tiling | None = None,
    dkdv_tiling: Tiling | None = None,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv), in the memory order of q, k, v; the same bits on every run.

    Args:
        dout, out: (batch, heads, num_queries, head_dim), lse: (batch, heads, num_queries), of `flash_forward`; the
            others as there. All have stride 1 along head_dim.
        dq_tiling, dkdv_tiling: None takes the tilings that ship or were measured for this case.
        into: tensors shaped as q, k and v, of any strides that end in 1, which receive the gradients.
        first: as of `flash_forward`.
    """
    dq, dk, dv = into or (empty_in_order_of(q), empty_in_order_of(k), empty_in_order_of(v))
    delta = torch.empty_like(lse)
    places = None if into is None else tuple(x.stride() for x in into)
    has_first = first is not None
    bounds = (lse, lse) if first is None else (first, last_queries(first, k.shape[2]))
    options = (causal, scale, precision, dq_tiling, dkdv_tiling, has_first, places)
    backward_calls((q, k, v, out, dout, lse), (delta, dq, dk, dv, *bounds), options)
    return dq, dk, dv


def last_queries(first: Tensor, num_keys: int) -> Tensor:
    """Return the last query that sees each key, (batch, num_keys) int32; `first` as of `flash_forward`."""
    last = first.new_empty(len(first), num_keys)
    last_calls((first,), (last,), (num_keys,))
    return last


@triton.jit(do_not_specialize=["part"])
def last_queries_kernel(first_pointer, last_pointer, num_queries, num_keys, part,
                        BLOCK: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """Search for the BLOCK keys of a program at once. `part`: queries of a part in the first step."""
    tiles = tl.cdiv(num_keys, BLOCK)
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    keys = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros((BLOCK,), tl.int32)  # the queries before it have a first key up to this one
    while part > 0:
        ends = low[:, None] + part * (1 + tl.arange(0, PARTS))[None, :] - 1
        first = tl.load(first_pointer + batch * num_queries + ends, mask=ends < num_queries, other=2147483647)
        low += part * tl.sum((first <= keys[:, None]).to(tl.int32), 1)
        part = part // PARTS
    tl.store(last_pointer + batch * num_keys + keys, low - 1, mask=keys < num_keys)


def _last_launch(options: tuple, first: Tensor, _: Tensor) -> Launch:
    (batch, num_queries), (num_keys,) = first.shape, options
    part = 1
    while part * PARTS < num_queries:
        part *= PARTS
    grid = (batch * count_tiles(num_keys, KEYS_AT_ONCE), 1)
    return grid, (num_queries, num_keys, part), {"BLOCK": KEYS_AT_ONCE, "PARTS": PARTS, "num_warps": 4}


last_calls = calls_of(last_queries_kernel, _last_launch)


def prepare_dq(tensors: tuple[Tensor, ...], options: tuple) -> Start:
    """Return what computes delta and dq in calls of this kind, from the pointers of the nine tensors."""
    causal, scale, precision, tiling, has_first = options
    loaded, scales = (0, 1, 2, 4), (scale, scale * LOG2_E.value)
    constants = {"CAUSAL": causal, "PRECISION": precision, "FIRST": has_first}
    prepare = partial(prepare_tiled, dq_kernel, tensors, loaded, scales, constants)
    return prepare_tuned("dq", prepare, tensors, loaded, (causal, precision, tiling))


@triton.jit(do_not_specialize=["heads"])  # one compilation, however many heads
def dq_kernel(
    q_source, k_source, v_source,  # pointers, or TMA descriptors
    out_pointer,
    dout_source,  # as q_source
    lse_pointer,
    delta_pointer,  # written here, read by dkdv_kernel
    dq_pointer,
    first_pointer,  # read only with FIRST
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,  # strides
    out_batch, out_head, out_row, dout_batch, dout_head, dout_row, dq_batch, dq_head, dq_row,
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
    q_view = tiles.view_head(q_source, q_batch, q_head, q_row, batch, head, num_queries)
    k_view = tiles.view_head(k_source, k_batch, k_head, k_row, batch, kv_head, num_keys)
    v_view = tiles.view_head(v_source, v_batch, v_head, v_row, batch, kv_head, num_keys)
    dout_view = tiles.view_head(dout_source, dout_batch, dout_head, dout_row, batch, head, num_queries)
    out_view = tiles.view_head(out_pointer, out_batch, out_head, out_row, batch, head, num_queries)
    dq_view = tiles.view_head(dq_pointer, dq_batch, dq_head, dq_row, batch, head, num_queries)

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


def prepare_dkdv(tensors: tuple[Tensor, ...], options: tuple) -> Start:
    """Return what computes dk and dv in calls of this kind, from the pointers of the ten tensors."""
    causal, scale, precision, tiling, has_first = options
    loaded, scales = (0, 1, 2, 3), (scale, scale * LOG2_E.value)
    common = {"CAUSAL": causal, "PRECISION": precision, "FIRST": has_first}

    def prepare_sums(tiling: Tiling, of_keys: bool, of_values: bool) -> Start:
        constants = {**common, "OF_KEYS": of_keys, "OF_VALUES": of_values}
        return prepare_tiled(dkdv_kernel, tensors, loaded, scales, constants, tiling, by_keys=True)

    def prepare(tiling: Tiling) -> Start:
        if not tiling.apart:
            return prepare_sums(tiling, True, True)
        sum_keys, sum_values = prepare_sums(tiling, True, False), prepare_sums(tiling, False, True)

        def start(*pointers: int) -> None:
            sum_keys(*pointers)
            sum_values(*pointers)

        return start

    return prepare_tuned("dkdv", prepare, tensors, loaded, (causal, precision, tiling))


@triton.jit(do_not_specialize=["kv_heads"])  # one compilation, however many heads
def dkdv_kernel(
    q_source, k_source, v_source, dout_source,  # pointers, or TMA descriptors
    lse_pointer,
    delta_pointer,  # written by dq_kernel
    dk_pointer, dv_pointer,
    first_pointer, last_pointer,  # read only with FIRST; the last query that sees each key, (batch, num_keys) int32
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,  # strides
    dout_batch, dout_head, dout_row, dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row,
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
    k_view = tiles.view_head(k_source, k_batch, k_head, k_row, batch, kv_head, num_keys)
    v_view = tiles.view_head(v_source, v_batch, v_head, v_row, batch, kv_head, num_keys)
    dk_view = tiles.view_head(dk_pointer, dk_batch, dk_head, dk_row, batch, kv_head, num_keys)
    dv_view = tiles.view_head(dv_pointer, dv_batch, dv_head, dv_row, batch, kv_head, num_keys)

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
        q_view = tiles.view_head(q_source, q_batch, q_head, q_row, batch, head, num_queries)
        dout_view = tiles.view_head(dout_source, dout_batch, dout_head, dout_row, batch, head, num_queries)
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


def prepare_backward(tensors: tuple[Tensor, ...], options: tuple) -> Start:
    """Return what computes dq, dk and dv in calls of this kind, from the pointers of the tensors."""
    q, k, v, out, dout, lse, delta, dq, dk, dv, first, last = tensors
    *common, dq_tiling, dkdv_tiling, has_first, _ = options
    start_queries = prepare_dq((q, k, v, out, dout, lse, delta, dq, first), (*common, dq_tiling, has_first))
    start_keys = prepare_dkdv(
        (q, k, v, dout, lse, delta, dk, dv, first, last), (*common, dkdv_tiling, has_first)
    )

    def start(q, k, v, out, dout, lse, delta, dq, dk, dv, first, last):
        start_queries(q, k, v, out, dout, lse, delta, dq, first)
        start_keys(q, k, v, dout, lse, delta, dk, dv, first, last)  # reads delta, which start_queries writes

    return start


backward_calls = LaunchCache(prepare_backward)
