"""The forward pass of FlashAttention-2 in portable Triton (Dao 2023, algorithm 1).

One program computes one tile of queries of one head. It walks over the tiles of keys that the tile may see with
an online softmax: first those that it sees whole, without any mask, then the few that the diagonal or the end of
the keys cuts. Under a causal mask the tiles past the diagonal are never touched.

The softmax works in base 2: exp(s * scale - m) = 2^(s * scale * log2(e) - m * log2(e)).
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
from lmkit.kernels.tiles import LN_2, LOG2_E, dot_over_parts, head_start, in_registers, load_tile, store_tile
from lmkit.kernels.tilings import Tiling
from lmkit.kernels.tuning import choose_tiling


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    precision: str = "ieee",
    tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of q over k and v.

    Args:
        q: (batch, heads, num_queries, head_dim), k and v: (batch, kv_heads, num_keys, head_dim); stride 1 along
            head_dim, any other strides; num_keys > 0.
        precision: how float32 is multiplied: "ieee", "bf16x6" or "tf32"; see `flash_triton`.
        tiling: None takes the one that ships or was measured for this case.

    Returns:
        out, strided as q, and lse: (batch, heads, num_queries) float32, log(sum(exp(score))), natural logarithm.
    """
    batch, heads, num_queries, head_dim = q.shape
    out = empty_in_order_of(q)
    lse = torch.empty((batch, heads, num_queries), dtype=torch.float32, device=q.device)

    def launch(tiling: Tiling) -> None:
        constants = kernel_constants(head_dim, causal, precision, tiling)
        launch_forward(
            count_tiles(num_queries, tiling.rows) * batch * heads,
            (
                *(source(q, tiling.rows, constants), source(k, tiling.columns, constants)),
                *(source(v, tiling.columns, constants), out, lse),
            ),
            (
                *(*head_strides(q), *head_strides(k), *head_strides(v), *head_strides(out)),
                *(heads, heads // k.shape[1], num_queries, k.shape[2], scale * LOG2_E.value),
            ),
            constants | {"CUT": causal or k.shape[2] % tiling.columns != 0},
        )

    with selected(q.device):
        if tiling is None:
            aligned = descriptors_reach(q, k, v)
            tiling = choose_tiling("flash_forward", q, k, causal, precision, aligned, launch)
        launch(tiling)
    return out, lse


@triton.jit(do_not_specialize=["heads"])  # one compilation, however many heads
def forward_kernel(
    q_source,  # pointers, or tensor descriptors
    k_source,
    v_source,
    out_pointer,
    lse_pointer,
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
    heads,
    group,  # query heads to a key head
    num_queries,
    num_keys,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    ROWS: tl.constexpr,  # queries of a tile
    COLUMNS: tl.constexpr,  # keys of a tile
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
        tile = num_tiles - 1 - tile  # the longest first: the short ones fill the gaps at the end
    row = tile * ROWS

    if not DESCRIPTORS:
        q_source = head_start(q_source, batch, head, q_stride_batch, q_stride_head)
        k_source = head_start(k_source, batch, kv_head, k_stride_batch, k_stride_head)
        v_source = head_start(v_source, batch, kv_head, v_stride_batch, v_stride_head)
    out_pointer = head_start(out_pointer, batch, head, out_stride_batch, out_stride_head)

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

    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, MAIN), tl.float32)
    acc_rest = tl.zeros((ROWS, REST if REST > 0 else 16), tl.float32)

    # Keys before `whole` are seen by every query of the tile, keys at and after `end` by none.
    end = num_keys
    whole = num_keys // COLUMNS * COLUMNS
    if CAUSAL:
        end = tl.minimum(num_keys, row + ROWS)
        whole = tl.minimum(whole, (row + 1) // COLUMNS * COLUMNS)
    acc, acc_rest, total, largest = walk_over_keys(
        acc, acc_rest, total, largest, q, q_rest, k_source, v_source, k_stride_row, v_stride_row,
        batch, kv_head, row, 0, whole, num_keys, scale_log2,
        HEAD_DIM, MAIN, REST, ROWS, COLUMNS, CAUSAL, False, PRECISION, DESCRIPTORS,
    )  # fmt: skip
    if CUT:
        acc, acc_rest, total, largest = walk_over_keys(
            acc, acc_rest, total, largest, q, q_rest, k_source, v_source, k_stride_row, v_stride_row,
            batch, kv_head, row, whole, end, num_keys, scale_log2,
            HEAD_DIM, MAIN, REST, ROWS, COLUMNS, CAUSAL, True, PRECISION, DESCRIPTORS,
        )  # fmt: skip

    rows = row + tl.arange(0, ROWS)
    lse = (largest + tl.log2(total)) * LN_2  # back to the natural logarithm
    tl.store(lse_pointer + batch_head.to(tl.int64) * num_queries + rows, lse, mask=rows < num_queries)
    out = acc / total[:, None]
    store_tile(out_pointer, out, out_stride_row, row, num_queries, ROWS, 0, MAIN, HEAD_DIM)
    if REST > 0:
        out_rest = acc_rest / total[:, None]
        store_tile(out_pointer, out_rest, out_stride_row, row, num_queries, ROWS, MAIN, REST, HEAD_DIM)


@triton.jit
def walk_over_keys(
    acc,  # (ROWS, MAIN) sum of 2^(score - largest) * v
    acc_rest,  # (ROWS, REST)
    total,  # (ROWS,) sum of 2^(score - largest)
    largest,  # (ROWS,) running maximum of the scaled scores
    q,
    q_rest,
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
        k_rest = k
        if REST > 0:
            k_rest = load_tile(
                k_source, k_stride_row, batch, kv_head, column, num_keys, COLUMNS, MAIN, REST, HEAD_DIM, MASKED,
                DESCRIPTORS,
            )  # fmt: skip
        scores = dot_over_parts(q, q_rest, k, k_rest, REST, PRECISION)  # (ROWS, COLUMNS)
        if MASKED:
            columns = column + tl.arange(0, COLUMNS)
            visible = (columns < num_keys)[None, :]
            if CAUSAL:
                visible = visible & (rows[:, None] >= columns[None, :])
            scores = tl.where(visible, scores, float("-inf"))
        # The scaled maximum is the state. Key 0 is in the first tile and every query sees it: `largest` is finite
        # from then on, unless the data are not.
        new_largest = tl.maximum(largest, tl.max(scores, 1) * scale_log2)
        p = tl.exp2(scores * scale_log2 - new_largest[:, None])
        shrink = tl.exp2(largest - new_largest)
        # Before the product the sum frees registers early, after it the tensor cores hide it: measured by head size.
        if MAIN <= 128:
            added = tl.sum(p, 1)
        acc = acc * shrink[:, None]

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
        p = p.to(v.dtype)
        acc = tl.dot(p, v, acc, input_precision=PRECISION)
        if REST > 0:
            v_rest = load_tile(
                v_source, v_stride_row, batch, kv_head, column, num_keys, COLUMNS, MAIN, REST, HEAD_DIM, MASKED,
                DESCRIPTORS,
            )  # fmt: skip
            acc_rest = acc_rest * shrink[:, None]
            acc_rest = tl.dot(p, v_rest, acc_rest, input_precision=PRECISION)
        if MAIN > 128:
            added = tl.sum(p, 1)
        total = total * shrink + added
        largest = new_largest
    return acc, acc_rest, total, largest


launch_forward = Launch(forward_kernel)
