"""The two small kernels around the fast backward: what must be ready before it, and dQ's way from float32
to 16 bits.

Strides come in units of 8 elements, so that 16-byte accesses are known to be aligned. Heads go along the
grid's first axis, the only one that takes more than 65,535. D is the width that heads take in the kernels and in the
sum of dQ, HEAD_DIM what of it is theirs (`support.width_of`).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lmkit.kernels.tiles import LOG2_E

ROWS = 32  # query rows of one program


@triton.jit
def _inside(valid, columns, HEAD_DIM: tl.constexpr):
    """(ROWS, D): which elements are of a valid row and of the first HEAD_DIM columns."""
    kept = valid[:, None]
    if columns.shape[0] > HEAD_DIM:
        kept = kept & (columns < HEAD_DIM)[None, :]
    return kept


@triton.jit(do_not_specialize=["num_queries", "padded", "heads", "scale", "out_batch", "out_head", "out_row",
                               "dout_batch", "dout_head", "dout_row"])  # fmt: skip
def prepare_kernel(out, dout, lse_in, lse_out, delta_out, dq_sum, num_queries, padded, heads, scale,
                   out_batch: tl.int64, out_head: tl.int64, out_row: tl.int64,
                   dout_batch: tl.int64, dout_head: tl.int64, dout_row: tl.int64,
                   D: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """delta = scale rowsum(dO * O); lse in log2 units, +inf past the last query (there P = 0); and zeros for the
    sum of dQ."""
    gdc_wait()  # for what the kernel before this one wrote
    gdc_launch_dependents()  # the next kernel may start, and waits in its turn
    flat_head = tl.program_id(0).to(tl.int64)
    batch = flat_head // heads
    head = flat_head % heads
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, D)
    valid = rows < num_queries
    inside = _inside(valid, columns, HEAD_DIM)
    wide = rows[:, None].to(tl.int64)
    o = tl.load(
        out + 8 * (batch * out_batch + head * out_head + wide * out_row) + columns,
        mask=inside,
        other=0.0,
    )
    do = tl.load(
        dout + 8 * (batch * dout_batch + head * dout_head + wide * dout_row) + columns,
        mask=inside,
        other=0.0,
    )
    tl.store(delta_out + flat_head * padded + rows, scale * tl.sum(o.to(tl.float32) * do.to(tl.float32), 1))
    lse = tl.load(lse_in + flat_head * num_queries + rows, mask=valid, other=float("inf"))
    tl.store(lse_out + flat_head * padded + rows, lse * LOG2_E)
    tl.store(dq_sum + (flat_head * padded + wide) * D + columns, tl.zeros([ROWS, D], tl.float32))


@triton.jit(do_not_specialize=["num_queries", "padded", "heads", "dq_batch", "dq_head", "dq_row"])
def finish_kernel(dq_sum, dq, num_queries, padded, heads, dq_batch: tl.int64, dq_head: tl.int64,
                  dq_row: tl.int64, D: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """dQ from its sum, rounded once. The sum comes in patches of 16 x 8 as `fragments.in_thread_order` lays them."""
    gdc_wait()  # for what the kernel before this one wrote
    gdc_launch_dependents()  # the next kernel may start, and waits in its turn
    flat_head = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, D)
    wide = rows[:, None].to(tl.int64)
    flat = (flat_head * padded + tl.program_id(1) * ROWS) * D + tl.arange(0, ROWS * D)
    patches = tl.reshape(tl.load(dq_sum + flat), [ROWS // 16, D // 8, 8, 4, 2, 2])
    total = tl.reshape(tl.permute(patches, (0, 4, 2, 1, 3, 5)), [ROWS, D])
    target = (
        dq + 8 * ((flat_head // heads) * dq_batch + (flat_head % heads) * dq_head + wide * dq_row) + columns
    )
    inside = _inside(rows < num_queries, columns, HEAD_DIM)
    tl.store(target, total.to(dq.dtype.element_ty), mask=inside)
