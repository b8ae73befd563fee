"""Compute attention forward in portable Triton: FlashAttention-2 (Dao 2023, algorithm 1).

One CTA computes one tile of queries of one head. It walks over the tiles of keys that the tile may see, with an
online softmax. For every key tile, with S = Q K^T:

    largest' = max(largest, rowmax(S) * scale)           P = exp(S * scale - largest')
    total    = total * exp(largest - largest') + rowsum(P)
    acc      = acc * exp(largest - largest') + P V

and at the end out = acc / total, lse = largest + log(total). The key tiles that every query of the tile sees come
first, without any mask; then the few that the diagonal or the end of the keys cuts. Under a causal mask the tiles
past the diagonal are never touched, nor those that `first` hides from the whole tile; the tiles that it cuts come
first, with a mask. Exponents are in base 2, exp(s * scale) = 2^(s * scale * log2(e)), because the
chip computes 2^x in one instruction.

acc, largest and total stay in registers, in float32. K and V stream through shared memory, where Triton keeps
`stages` tiles of each in flight and places the barriers. Shared memory holds these tiles, and q unless it is read
from registers: at head_dim 128 in bfloat16, tiles of 64 keys and three stages take 2 * 3 * 64 * 128 * 2 bytes = 96
KiB, so two CTAs share an SM of a Hopper GPU (227 KiB).

`lmkit.core.attention` has the plain formula (`reference`), and the same tiles in PyTorch (`flash_torch`).
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmkit.kernels.flash import tiles
from lmkit.kernels.flash.tiles import LN_2, LOG2_E
from lmkit.kernels.flash.tuning import Tiling, prepare_tiled, prepare_tuned
from lmkit.kernels.launch import LaunchCache, Start, empty_in_order_of


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    precision: str = "ieee",
    tiling: Tiling | None = None,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the attention of q over k and v, and the log-sum-exp of its scores.

    Args:
        q: (batch, heads, num_queries, head_dim), k and v: (batch, kv_heads, num_keys, head_dim); stride 1 along
            head_dim, any other strides; num_keys > 0.
        precision: how float32 is multiplied: "ieee", "bf16x6" or "tf32"; see `lmkit.attention.flash_triton`.
        tiling: None takes the tiling that ships or was measured for this case.
        first: (batch, num_queries) int32, contiguous, values that never fall: query i sees no key before first[i],
            which is at most i. Needs `causal`.

    Returns:
        out, in q's memory order, and lse: (batch, heads, num_queries) float32, log(sum(exp(score))), natural
        logarithm.
    """
    out = empty_in_order_of(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    outputs = (out, lse, lse if first is None else first)  # the last is read only with `first`
    forward_calls((q, k, v), outputs, (causal, scale, precision, tiling, first is not None))
    return out, lse


def prepare_forward(tensors: tuple[Tensor, ...], options: tuple) -> Start:
    """Return what computes out and lse in calls of this kind, from pointers; without `first`, its may be any."""
    causal, scale, precision, tiling, has_first = options
    loaded, scales = (0, 1, 2), (scale * LOG2_E.value,)
    constants = {"CAUSAL": causal, "PRECISION": precision, "FIRST": has_first}
    prepare = partial(prepare_tiled, forward_kernel, tensors, loaded, scales, constants)
    return prepare_tuned("forward", prepare, tensors, loaded, (causal, precision, tiling))


@triton.jit(do_not_specialize=["heads"])  # one compilation, however many heads
def forward_kernel(
    q_source, k_source, v_source,  # pointers, or TMA descriptors
    out_pointer, lse_pointer,
    first_pointer,  # read only with FIRST
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,  # strides
    out_batch, out_head, out_row,
    heads,
    group,  # query heads to a key head
    num_queries, num_keys,
    scale_log2,  # scale * log2(e)
    HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,  # see `tiles`
    ROWS: tl.constexpr,  # queries of a tile
    COLUMNS: tl.constexpr,  # keys of a tile
    CAUSAL: tl.constexpr,
    CUT: tl.constexpr,  # some tiles are cut by the diagonal or by the end of the keys
    FIRST: tl.constexpr,  # queries see no key before their `first`
    PRECISION: tl.constexpr,
    REGISTERS: tl.constexpr,  # q is read from registers (see `in_registers`)
):  # fmt: skip
    row, batch_head, batch, head, kv_head = tiles.locate_query_tile(heads, group, num_queries, ROWS, CAUSAL)
    q_view = tiles.view_head(q_source, q_batch, q_head, q_row, batch, head, num_queries)
    k_view = tiles.view_head(k_source, k_batch, k_head, k_row, batch, kv_head, num_keys)
    v_view = tiles.view_head(v_source, v_batch, v_head, v_row, batch, kv_head, num_keys)
    out_view = tiles.view_head(out_pointer, out_batch, out_head, out_row, batch, head, num_queries)

    q = tiles.load_main(q_view, row, ROWS, MAIN, HEAD_DIM, True)  # (ROWS, MAIN)
    q_rest = tiles.load_rest(q_view, row, ROWS, MAIN, REST, HEAD_DIM, True, q)  # (ROWS, REST)
    if REGISTERS:
        q = tiles.in_registers(q, row, num_queries, ROWS)

    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, MAIN), tl.float32)
    acc_rest = tiles.zeros_of_rest(ROWS, REST)

    whole, end = tiles.bound_keys(row, num_keys, ROWS, COLUMNS, CAUSAL)
    begin = 0
    first = 0
    if FIRST:
        begin, clear, whole = tiles.bound_first(first_pointer, batch, row, num_queries, whole, ROWS, COLUMNS)
        first = tiles.load_first(first_pointer, batch, row + tl.arange(0, ROWS), num_queries)
        acc, acc_rest, total, largest = walk_over_keys(
            acc, acc_rest, total, largest, q, q_rest, k_view, v_view, row, first, begin, clear, scale_log2,
            HEAD_DIM, MAIN, REST, ROWS, COLUMNS, CAUSAL, True, FIRST, PRECISION,
        )  # fmt: skip
        begin = clear
    acc, acc_rest, total, largest = walk_over_keys(
        acc, acc_rest, total, largest, q, q_rest, k_view, v_view, row, first, begin, whole, scale_log2,
        HEAD_DIM, MAIN, REST, ROWS, COLUMNS, CAUSAL, False, FIRST, PRECISION,
    )  # fmt: skip
    if CUT:
        acc, acc_rest, total, largest = walk_over_keys(
            acc, acc_rest, total, largest, q, q_rest, k_view, v_view, row, first, whole, end, scale_log2,
            HEAD_DIM, MAIN, REST, ROWS, COLUMNS, CAUSAL, True, FIRST, PRECISION,
        )  # fmt: skip

    rows = row + tl.arange(0, ROWS)
    lse = (largest + tl.log2(total)) * LN_2  # back to the natural logarithm
    tl.store(lse_pointer + batch_head.to(tl.int64) * num_queries + rows, lse, mask=rows < num_queries)
    tiles.store_main(out_view, acc / total[:, None], row, ROWS, MAIN, HEAD_DIM)
    tiles.store_rest(out_view, acc_rest / total[:, None], row, ROWS, MAIN, REST, HEAD_DIM)


@triton.jit
def walk_over_keys(
    acc, acc_rest,  # (ROWS, MAIN), (ROWS, REST): sum of 2^(score - largest) * v
    total,  # (ROWS,) sum of 2^(score - largest)
    largest,  # (ROWS,) running maximum of the scaled scores
    q, q_rest, k_view, v_view, row,
    first,  # (ROWS,) the first key that each query sees; read only with FIRST
    begin, end,  # keys from `begin`, a multiple of COLUMNS, up to `end`
    scale_log2,
    HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,  # these tiles are cut by the diagonal, by `first` or by the end of the keys
    FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Carry (acc, acc_rest, total, largest) of the online softmax on over these keys."""
    rows = row + tl.arange(0, ROWS)
    for column in range(begin, end, COLUMNS):
        column = tl.multiple_of(column, COLUMNS)
        k = tiles.load_main(k_view, column, COLUMNS, MAIN, HEAD_DIM, MASKED)  # (COLUMNS, MAIN)
        k_rest = tiles.load_rest(k_view, column, COLUMNS, MAIN, REST, HEAD_DIM, MASKED, k)  # (COLUMNS, REST)
        scores = tiles.dot_over_parts(q, q_rest, k, k_rest, REST, PRECISION)  # (ROWS, COLUMNS)
        if MASKED:
            visible = tiles.visible_keys(rows, first, column, k_view.length, COLUMNS, CAUSAL, FIRST)
            scores = tl.where(visible, scores, float("-inf"))
        # Without `first`, every query sees key 0 in the first tile: `largest` is then finite if the data are.
        new_largest = tl.maximum(largest, tl.max(scores, 1) * scale_log2)
        base = new_largest
        if FIRST and MASKED:  # a query that has seen no key yet: its sums stay zero
            base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        p = tl.exp2(scores * scale_log2 - base[:, None])
        shrink = tl.exp2(largest - base)
        # Summed before the product, p frees its registers early; after it, the tensor cores hide the sum.
        if MAIN <= 128:
            added = tl.sum(p, 1)
        acc = acc * shrink[:, None]

        v = tiles.load_main(v_view, column, COLUMNS, MAIN, HEAD_DIM, MASKED)  # (COLUMNS, MAIN)
        p = p.to(v.dtype)
        acc = tl.dot(p, v, acc, input_precision=PRECISION)
        if REST > 0:
            # (COLUMNS, REST)
            v_rest = tiles.load_rest(v_view, column, COLUMNS, MAIN, REST, HEAD_DIM, MASKED, v)
            acc_rest = acc_rest * shrink[:, None]
            acc_rest = tl.dot(p, v_rest, acc_rest, input_precision=PRECISION)
        if MAIN > 128:
            added = tl.sum(p, 1)
        total = total * shrink + added
        largest = new_largest
    return acc, acc_rest, total, largest


forward_calls = LaunchCache(prepare_forward)
