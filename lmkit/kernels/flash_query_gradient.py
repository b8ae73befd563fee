"""The gradient of the queries in FlashAttention-2, in portable Triton; see `flash_backward` for the whole.

One program owns a tile of queries and walks over the tiles of keys that it sees, as the forward pass does. It also
computes delta = rowsum(dO * O), which the gradients of keys and values need.
"""

import torch
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


def query_gradient(
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
    tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor]:
    """(dq, delta): dq strided as q, delta (batch, heads, num_queries) float32. Arguments as of `flash_backward`."""
    batch, heads, num_queries, head_dim = q.shape
    kv_heads, num_keys = k.shape[1:3]
    dq = empty_in_order_of(q)
    delta = torch.empty_like(lse)

    def launch(tiling: Tiling) -> None:
        constants = kernel_constants(head_dim, causal, precision, tiling)
        launch_dq(
            count_tiles(num_queries, tiling.rows) * batch * heads,
            (
                *(source(q, tiling.rows, constants), source(k, tiling.columns, constants)),
                *(source(v, tiling.columns, constants), out, source(dout, tiling.rows, constants)),
                *(lse, delta, dq),
            ),
            (
                *(*head_strides(q), *head_strides(k), *head_strides(v)),
                *(*head_strides(out), *head_strides(dout), *head_strides(dq)),
                *(heads, heads // kv_heads, num_queries, num_keys, scale, scale * LOG2_E.value),
            ),
            constants | {"CUT": causal or num_keys % tiling.columns != 0},
        )

    with selected(q.device):
        if tiling is None:
            aligned = descriptors_reach(q, k, v, dout)
            tiling = choose_tiling("query_gradient", q, k, causal, precision, aligned, launch)
        launch(tiling)
    return dq, delta


@triton.jit(do_not_specialize=["heads"])  # one compilation, however many heads
def dq_kernel(
    q_source,  # pointers, or tensor descriptors
    k_source,
    v_source,
    out_pointer,
    dout_source,
    lse_pointer,
    delta_pointer,  # written here, read by dkdv_kernel
    dq_pointer,
    q_stride_batch,
    q_stride_head,
    q_stride_row,
    k_stride_batch,
    k_stride_head,
    k_stride_row,
    v_stride_batch,
    v_stride_head,
    v_stride_row,
    out_stride_batch,
    out_stride_head,
    out_stride_row,
    dout_stride_batch,
    dout_stride_head,
    dout_stride_row,
    dq_stride_batch,
    dq_stride_head,
    dq_stride_row,
    heads,
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
    CUT: tl.constexpr,  # some tiles are cut by the diagonal or by the end of the keys
    PRECISION: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    REGISTERS: tl.constexpr,
):
    num_tiles = tl.cdiv(num_queries, ROWS)
    tile = tl.program_id(0) % num_tiles
    batch_head = tl.program_id(0) // num_tiles
    batch, head = batch_head // heads, batch_head % heads
    kv_head = head // group
    if CAUSAL:
        tile = num_tiles - 1 - tile  # the longest first
    row = tile * ROWS

    if not DESCRIPTORS:
        q_source = head_start(q_source, batch, head, q_stride_batch, q_stride_head)
        k_source = head_start(k_source, batch, kv_head, k_stride_batch, k_stride_head)
        v_source = head_start(v_source, batch, kv_head, v_stride_batch, v_stride_head)
        dout_source = head_start(dout_source, batch, head, dout_stride_batch, dout_stride_head)
    out_pointer = head_start(out_pointer, batch, head, out_stride_batch, out_stride_head)
    dq_pointer = head_start(dq_pointer, batch, head, dq_stride_batch, dq_stride_head)

    # delta = rowsum(dO * O)
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
    out = load_tile(
        out_pointer, out_stride_row, batch, head, row, num_queries, ROWS, 0, MAIN, HEAD_DIM, True, False
    )  # (ROWS, MAIN)
    delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1)  # (ROWS,)
    dout_rest = dout
    if REST > 0:
        dout_rest = load_tile(
            dout_source,
            dout_stride_row,
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
        out_rest = load_tile(
            out_pointer,
            out_stride_row,
            batch,
            head,
            row,
            num_queries,
            ROWS,
            MAIN,
            REST,
            HEAD_DIM,
            True,
            False,
        )  # (ROWS, REST)
        delta += tl.sum(dout_rest.to(tl.float32) * out_rest.to(tl.float32), 1)
    rows = row + tl.arange(0, ROWS)
    statistics = batch_head.to(tl.int64) * num_queries
    tl.store(delta_pointer + statistics + rows, delta, mask=rows < num_queries)
    lse_log2 = tl.load(lse_pointer + statistics + rows, mask=rows < num_queries, other=float("inf")) * LOG2_E

    q = load_tile(
        q_source, q_stride_row, batch, head, row, num_queries, ROWS, 0, MAIN, HEAD_DIM, True, DESCRIPTORS
    )  # (ROWS, MAIN)
    q_rest = q
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
    if REGISTERS:
        q = in_registers(q, row, num_queries, ROWS)
        dout = in_registers(dout, row, num_queries, ROWS)

    dq = tl.zeros((ROWS, MAIN), tl.float32)
    dq_rest = tl.zeros((ROWS, REST if REST > 0 else 16), tl.float32)

    # Keys before `whole` are seen by every query of the tile, keys at and after `end` by none.
    end = num_keys
    whole = num_keys // COLUMNS * COLUMNS
    if CAUSAL:
        end = tl.minimum(num_keys, row + ROWS)
        whole = tl.minimum(whole, (row + 1) // COLUMNS * COLUMNS)
    dq, dq_rest = walk_over_keys(
        dq, dq_rest, q, q_rest, dout, dout_rest, lse_log2, delta, k_source, v_source, k_stride_row, v_stride_row,
        batch, kv_head, row, 0, whole, num_keys, scale_log2,
        HEAD_DIM, MAIN, REST, ROWS, COLUMNS, CAUSAL, False, PRECISION, DESCRIPTORS,
    )  # fmt: skip
    if CUT:
        dq, dq_rest = walk_over_keys(
            dq, dq_rest, q, q_rest, dout, dout_rest, lse_log2, delta, k_source, v_source, k_stride_row, v_stride_row,
            batch, kv_head, row, whole, end, num_keys, scale_log2,
            HEAD_DIM, MAIN, REST, ROWS, COLUMNS, CAUSAL, True, PRECISION, DESCRIPTORS,
        )  # fmt: skip

    store_tile(dq_pointer, dq * scale, dq_stride_row, row, num_queries, ROWS, 0, MAIN, HEAD_DIM)
    if REST > 0:
        store_tile(dq_pointer, dq_rest * scale, dq_stride_row, row, num_queries, ROWS, MAIN, REST, HEAD_DIM)


@triton.jit
def walk_over_keys(
    dq,  # (ROWS, MAIN)
    dq_rest,  # (ROWS, REST)
    q,
    q_rest,
    dout,
    dout_rest,
    lse_log2,  # (ROWS,)
    delta,  # (ROWS,)
    k_source,
    v_source,
    k_stride_row,
    v_stride_row,
    batch,
    kv_head,
    row,
    begin,
    end,
    num_keys,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,  # these tiles are cut by the diagonal or by the end of the keys
    PRECISION: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    rows = row + tl.arange(0, ROWS)
    for column in range(begin, end, COLUMNS):
        column = tl.multiple_of(column, COLUMNS)
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
            MASKED,
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
            MASKED,
            DESCRIPTORS,
        )  # (COLUMNS, MAIN)
        k_rest = k
        v_rest = v
        if REST > 0:
            k_rest = load_tile(
                k_source, k_stride_row, batch, kv_head, column, num_keys, COLUMNS, MAIN, REST, HEAD_DIM, MASKED,
                DESCRIPTORS,
            )  # fmt: skip
            v_rest = load_tile(
                v_source, v_stride_row, batch, kv_head, column, num_keys, COLUMNS, MAIN, REST, HEAD_DIM, MASKED,
                DESCRIPTORS,
            )  # fmt: skip
        scores = dot_over_parts(q, q_rest, k, k_rest, REST, PRECISION)  # (ROWS, COLUMNS)
        dp = dot_over_parts(dout, dout_rest, v, v_rest, REST, PRECISION)  # (ROWS, COLUMNS)
        p = tl.exp2(scores * scale_log2 - lse_log2[:, None])
        if MASKED:
            columns = column + tl.arange(0, COLUMNS)
            visible = (columns < num_keys)[None, :]
            if CAUSAL:
                visible = visible & (rows[:, None] >= columns[None, :])
            p = tl.where(visible, p, 0.0)
        ds = (p * (dp - delta[:, None])).to(k.dtype)  # (ROWS, COLUMNS)
        dq = tl.dot(ds, k, dq, input_precision=PRECISION)
        if REST > 0:
            dq_rest = tl.dot(ds, k_rest, dq_rest, input_precision=PRECISION)
    return dq, dq_rest


launch_dq = Launch(dq_kernel)
