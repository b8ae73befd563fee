"""The gradients of keys and values in FlashAttention-2, in portable Triton; see `flash_backward` for the whole.

One program owns a tile of keys and walks over the tiles of queries that see it, of all heads of its group one
after the other: no two programs write to the same place. It works on transposed scores, S^T = K Q^T, so that P^T
and dS^T feed the next products from registers.
"""

import triton
import triton.language as tl
from torch import Tensor

from lmkit.kernels.launching import (
    Launch,
    count_tiles,
    descriptors_reach,
    empty_in_order_of,
    head_strides,
    kernel_constants,
    selected,
    source,
)
from lmkit.kernels.tiles import LOG2_E, dot_over_parts, head_start, in_registers, load_tile, store_tile
from lmkit.kernels.tilings import Tiling
from lmkit.kernels.tuning import choose_tiling


def key_gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    *,
    causal: bool,
    scale: float,
    precision: str = "ieee",
    tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor]:
    """(dk, dv), strided as k and v. delta comes from `query_gradient`; the others as of `flash_backward`."""
    batch, heads, num_queries, head_dim = q.shape
    kv_heads, num_keys = k.shape[1:3]
    dk, dv = empty_in_order_of(k), empty_in_order_of(v)

    def launch(tiling: Tiling) -> None:
        constants = kernel_constants(head_dim, causal, precision, tiling)
        for of_keys, of_values in ((True, False), (False, True)) if tiling.apart else ((True, True),):
            launch_dkdv(
                count_tiles(num_keys, tiling.columns) * batch * kv_heads,
                (
                    *(source(q, tiling.rows, constants), source(k, tiling.columns, constants)),
                    *(source(v, tiling.columns, constants), source(dout, tiling.rows, constants)),
                    *(lse, delta, dk, dv),
                ),
                (
                    *(*head_strides(q), *head_strides(k), *head_strides(v)),
                    *(*head_strides(dout), *head_strides(dk), *head_strides(dv)),
                    *(kv_heads, heads // kv_heads, num_queries, num_keys, scale, scale * LOG2_E.value),
                ),
                constants | {"OF_KEYS": of_keys, "OF_VALUES": of_values},
            )

    with selected(q.device):
        if tiling is None:
            aligned = descriptors_reach(q, k, v, dout)
            tiling = choose_tiling("key_gradients", q, k, causal, precision, aligned, launch)
        launch(tiling)
    return dk, dv


@triton.jit(do_not_specialize=["kv_heads"])  # one compilation, however many heads
def dkdv_kernel(
    q_source,  # pointers, or tensor descriptors
    k_source,
    v_source,
    dout_source,
    lse_pointer,
    delta_pointer,
    dk_pointer,
    dv_pointer,
    q_stride_batch,
    q_stride_head,
    q_stride_row,
    k_stride_batch,
    k_stride_head,
    k_stride_row,
    v_stride_batch,
    v_stride_head,
    v_stride_row,
    dout_stride_batch,
    dout_stride_head,
    dout_stride_row,
    dk_stride_batch,
    dk_stride_head,
    dk_stride_row,
    dv_stride_batch,
    dv_stride_head,
    dv_stride_row,
    kv_heads,
    group,
    num_queries,
    num_keys,
    scale,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CAUSAL: tl.constexpr,
    OF_KEYS: tl.constexpr,  # sum dK
    OF_VALUES: tl.constexpr,  # sum dV
    PRECISION: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    REGISTERS: tl.constexpr,
):
    num_tiles = tl.cdiv(num_keys, COLUMNS)
    tile = (
        tl.program_id(0) % num_tiles
    )  # under a causal mask the first keys are seen by most queries: longest first
    batch_head = tl.program_id(0) // num_tiles
    batch, kv_head = batch_head // kv_heads, batch_head % kv_heads
    column = tile * COLUMNS

    if not DESCRIPTORS:
        k_source = head_start(k_source, batch, kv_head, k_stride_batch, k_stride_head)
        v_source = head_start(v_source, batch, kv_head, v_stride_batch, v_stride_head)
    dk_pointer = head_start(dk_pointer, batch, kv_head, dk_stride_batch, dk_stride_head)
    dv_pointer = head_start(dv_pointer, batch, kv_head, dv_stride_batch, dv_stride_head)

    k = load_tile(
        k_source,
        k_stride_row,
        batch,
        kv_head,
        column,
        num_keys,
        COLUMNS,
        0,
        MAIN,
        HEAD_DIM,
        True,
        DESCRIPTORS,
    )  # (COLUMNS, MAIN)
    v = load_tile(
        v_source,
        v_stride_row,
        batch,
        kv_head,
        column,
        num_keys,
        COLUMNS,
        0,
        MAIN,
        HEAD_DIM,
        True,
        DESCRIPTORS,
    )  # (COLUMNS, MAIN)
    k_rest = k
    v_rest = v
    if REST > 0:
        k_rest = load_tile(
            k_source,
            k_stride_row,
            batch,
            kv_head,
            column,
            num_keys,
            COLUMNS,
            MAIN,
            REST,
            HEAD_DIM,
            True,
            DESCRIPTORS,
        )  # (COLUMNS, REST)
        v_rest = load_tile(
            v_source,
            v_stride_row,
            batch,
            kv_head,
            column,
            num_keys,
            COLUMNS,
            MAIN,
            REST,
            HEAD_DIM,
            True,
            DESCRIPTORS,
        )  # (COLUMNS, REST)
    if REGISTERS:
        k = in_registers(k, column, num_keys, COLUMNS)
        v = in_registers(v, column, num_keys, COLUMNS)

    dk = tl.zeros((COLUMNS, MAIN), tl.float32)
    dv = tl.zeros((COLUMNS, MAIN), tl.float32)
    dk_rest = tl.zeros((COLUMNS, REST if REST > 0 else 16), tl.float32)
    dv_rest = tl.zeros((COLUMNS, REST if REST > 0 else 16), tl.float32)

    # Queries before `begin` see none of these keys; from `whole` on they see all of them.
    begin = 0
    whole = 0
    if CAUSAL:
        begin = column // ROWS * ROWS
        whole = tl.minimum(tl.cdiv(column + COLUMNS - 1, ROWS) * ROWS, tl.cdiv(num_queries, ROWS) * ROWS)
    for member in range(group):
        head = kv_head * group + member
        statistics = (batch.to(tl.int64) * kv_heads * group + head) * num_queries
        q_head = q_source
        dout_head = dout_source
        if not DESCRIPTORS:
            q_head = head_start(q_source, batch, head, q_stride_batch, q_stride_head)
            dout_head = head_start(dout_source, batch, head, dout_stride_batch, dout_stride_head)
        if CAUSAL:
            dk, dk_rest, dv, dv_rest = walk_over_queries(
                dk, dk_rest, dv, dv_rest, k, k_rest, v, v_rest, q_head, dout_head, q_stride_row, dout_stride_row,
                lse_pointer + statistics, delta_pointer + statistics, batch, head, column, begin, whole, num_queries,
                scale_log2, HEAD_DIM, MAIN, REST, ROWS, COLUMNS, True, OF_KEYS, OF_VALUES, PRECISION, DESCRIPTORS,
            )  # fmt: skip
        dk, dk_rest, dv, dv_rest = walk_over_queries(
            dk, dk_rest, dv, dv_rest, k, k_rest, v, v_rest, q_head, dout_head, q_stride_row, dout_stride_row,
            lse_pointer + statistics, delta_pointer + statistics, batch, head, column, whole, num_queries,
            num_queries, scale_log2, HEAD_DIM, MAIN, REST, ROWS, COLUMNS, False, OF_KEYS, OF_VALUES, PRECISION,
            DESCRIPTORS,
        )  # fmt: skip

    if OF_KEYS:
        store_tile(dk_pointer, dk * scale, dk_stride_row, column, num_keys, COLUMNS, 0, MAIN, HEAD_DIM)
        if REST > 0:
            store_tile(
                dk_pointer, dk_rest * scale, dk_stride_row, column, num_keys, COLUMNS, MAIN, REST, HEAD_DIM
            )
    if OF_VALUES:
        store_tile(dv_pointer, dv, dv_stride_row, column, num_keys, COLUMNS, 0, MAIN, HEAD_DIM)
        if REST > 0:
            store_tile(dv_pointer, dv_rest, dv_stride_row, column, num_keys, COLUMNS, MAIN, REST, HEAD_DIM)


@triton.jit
def walk_over_queries(
    dk,  # (COLUMNS, MAIN)
    dk_rest,  # (COLUMNS, REST)
    dv,
    dv_rest,
    k,
    k_rest,
    v,
    v_rest,
    q_source,
    dout_source,
    q_stride_row,
    dout_stride_row,
    lse_pointer,  # of this head
    delta_pointer,
    batch,
    head,
    column,
    begin,
    end,
    num_queries,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MASKED: tl.constexpr,  # these tiles are cut by the diagonal
    OF_KEYS: tl.constexpr,
    OF_VALUES: tl.constexpr,
    PRECISION: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    columns = column + tl.arange(0, COLUMNS)
    for row in range(begin, end, ROWS):
        row = tl.multiple_of(row, ROWS)
        q = load_tile(
            q_source, q_stride_row, batch, head, row, num_queries, ROWS, 0, MAIN, HEAD_DIM, True, DESCRIPTORS
        )  # (ROWS, MAIN)
        dout = load_tile(
            dout_source,
            dout_stride_row,
            batch,
            head,
            row,
            num_queries,
            ROWS,
            0,
            MAIN,
            HEAD_DIM,
            True,
            DESCRIPTORS,
        )  # (ROWS, MAIN)
        q_rest = q
        dout_rest = dout
        if REST > 0:
            q_rest = load_tile(
                q_source,
                q_stride_row,
                batch,
                head,
                row,
                num_queries,
                ROWS,
                MAIN,
                REST,
                HEAD_DIM,
                True,
                DESCRIPTORS,
            )  # (ROWS, REST)
            dout_rest = load_tile(
                dout_source, dout_stride_row, batch, head, row, num_queries, ROWS, MAIN, REST, HEAD_DIM, True,
                DESCRIPTORS,
            )  # fmt: skip
        rows = row + tl.arange(0, ROWS)
        # Rows past the end get lse = infinity, so that p = 0 there: no other mask is needed for them.
        lse_log2 = tl.load(lse_pointer + rows, mask=rows < num_queries, other=float("inf")) * LOG2_E
        delta = tl.load(delta_pointer + rows, mask=rows < num_queries, other=0.0)

        scores = dot_over_parts(k, k_rest, q, q_rest, REST, PRECISION)  # (COLUMNS, ROWS), transposed
        if OF_KEYS:
            dp = dot_over_parts(v, v_rest, dout, dout_rest, REST, PRECISION)  # (COLUMNS, ROWS), transposed
        p = tl.exp2(scores * scale_log2 - lse_log2[None, :])
        if MASKED:
            p = tl.where(rows[None, :] >= columns[:, None], p, 0.0)
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


launch_dkdv = Launch(dkdv_kernel)
