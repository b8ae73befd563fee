"""flash_triton's portable kernels with one idea taken out, to measure what it gives: variants of the bench alone.

* `no_skip` masks the tiles past the diagonal like all others, instead of leaving them out;
* `atomic` computes dQ in the kernel of dK and dV, with atomic additions: five products instead of seven, and sums
  whose order differs from run to run.

Both use the tiles of the kernels that they are compared with.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmkit.attention.flash_triton import refuse_unsupported
from lmkit.core.attention import prepare_inputs
from lmkit.errors import UsageError
from lmkit.kernels.flash import tiles
from lmkit.kernels.flash.backward import flash_backward
from lmkit.kernels.flash.forward import flash_forward
from lmkit.kernels.flash.tiles import LOG2_E
from lmkit.kernels.flash.tuning import (
    INTERPRETER_TILING,
    Case,
    Tiling,
    candidate_tilings,
    length_bucket,
    prepare_tiled,
    shipped_tiling,
    tma_reaches,
)
from lmkit.kernels.launch import capability


def no_skip(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None) -> Tensor:
    """Compute attention with every tile of keys, those past the diagonal too."""
    q, k, v, scale = prepare_inputs(q, k, v, scale)
    refuse_unsupported(q)
    return _NoSkip.apply(q, k, v, causal, scale)


def atomic(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None) -> Tensor:
    """Compute attention; its backward pass is one kernel."""
    q, k, v, scale = prepare_inputs(q, k, v, scale)
    refuse_unsupported(q)
    if q.shape[3] & (q.shape[3] - 1):
        message = f"flash_triton:atomic: head_dim {q.shape[3]} is not a power of two"
        raise UsageError("attention.unsupported", message, hint="measure it at head_dim 64 or 128")
    return _Atomic.apply(q, k, v, causal, scale)


def tiling_of(kernel: str, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tiling:
    """Return the tiling of a portable kernel that was measured on this chip, or its default."""
    if not q.is_cuda:
        return INTERPRETER_TILING
    case = Case(kernel, q.shape[3], causal, q.dtype, "ieee", length_bucket(k.shape[2]), tma_reaches(q, k, v))
    chip = capability(q.device)
    return shipped_tiling(case, chip) or candidate_tilings(case, chip)[0]


class _NoSkip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        options: Any = {"causal": tiles.NO_SKIP.value if causal else False, "scale": scale}
        out, lse = flash_forward(q, k, v, tiling=tiling_of("forward", q, k, v, causal), **options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal, ctx.options = causal, options
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dkdv = (tiling_of(kernel, q, k, v, ctx.causal) for kernel in ("dq", "dkdv"))
        saved = (q, k, v, out, lse)
        return *flash_backward(dout, *saved, dq_tiling=dq, dkdv_tiling=dkdv, **ctx.options), None, None


class _Atomic(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        out, lse = flash_forward(q, k, v, causal=causal, scale=scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal, ctx.scale = causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        delta = (dout.float() * out.float()).sum(-1)
        dq_sum = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        tiling = tiling_of("dkdv", q, k, v, ctx.causal)
        tensors = (q, k, v, dout, lse, delta, dq_sum, dk, dv)
        constants = {"CAUSAL": ctx.causal, "PRECISION": "ieee"}
        scales = (ctx.scale, ctx.scale * LOG2_E.value)
        start = prepare_tiled(atomic_kernel, tensors, (0, 1, 2, 3), scales, constants, tiling, by_keys=True)
        start(*(x.data_ptr() for x in tensors))
        return (dq_sum * ctx.scale).to(q.dtype), dk, dv, None, None


@triton.jit(do_not_specialize=["kv_heads"])
def atomic_kernel(
    q_source, k_source, v_source, dout_source, lse_pointer, delta_pointer, dq_pointer, dk_pointer, dv_pointer,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,  # strides
    dout_batch, dout_head, dout_row, dq_batch, dq_head, dq_row, dk_batch, dk_head, dk_row,
    dv_batch, dv_head, dv_row,
    kv_heads, group, num_queries, num_keys, scale, scale_log2,
    HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, REGISTERS: tl.constexpr,
):  # fmt: skip
    """`dkdv_kernel` with dQ: see lmkit/kernels/flash/backward.py. Needs REST = 0."""
    num_tiles = tl.cdiv(num_keys, COLUMNS)
    column = tl.program_id(0) % num_tiles * COLUMNS
    batch_head = tl.program_id(0) // num_tiles
    batch, kv_head = batch_head // kv_heads, batch_head % kv_heads
    k_view = tiles.view_head(k_source, k_batch, k_head, k_row, batch, kv_head, num_keys)
    v_view = tiles.view_head(v_source, v_batch, v_head, v_row, batch, kv_head, num_keys)
    k = tiles.load_main(k_view, column, COLUMNS, MAIN, HEAD_DIM, True)  # (COLUMNS, MAIN)
    v = tiles.load_main(v_view, column, COLUMNS, MAIN, HEAD_DIM, True)  # (COLUMNS, MAIN)
    dk = tl.zeros((COLUMNS, MAIN), tl.float32)
    dv = tl.zeros((COLUMNS, MAIN), tl.float32)
    columns, dims = column + tl.arange(0, COLUMNS), tl.arange(0, MAIN)
    begin = 0
    if CAUSAL:
        begin = column // ROWS * ROWS
    for member in range(group):
        head = kv_head * group + member
        statistics = (batch.to(tl.int64) * kv_heads * group + head) * num_queries
        q_view = tiles.view_head(q_source, q_batch, q_head, q_row, batch, head, num_queries)
        dout_view = tiles.view_head(dout_source, dout_batch, dout_head, dout_row, batch, head, num_queries)
        dq_view = tiles.view_head(dq_pointer, dq_batch, dq_head, dq_row, batch, head, num_queries)
        for row in range(begin, num_queries, ROWS):
            row = tl.multiple_of(row, ROWS)
            q = tiles.load_main(q_view, row, ROWS, MAIN, HEAD_DIM, True)  # (ROWS, MAIN)
            dout = tiles.load_main(dout_view, row, ROWS, MAIN, HEAD_DIM, True)  # (ROWS, MAIN)
            rows = row + tl.arange(0, ROWS)
            inside = rows < num_queries
            lse = tl.load(lse_pointer + statistics + rows, mask=inside, other=float("inf")) * LOG2_E
            delta = tl.load(delta_pointer + statistics + rows, mask=inside, other=0.0)
            scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # (COLUMNS, ROWS), transposed
            dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)  # (COLUMNS, ROWS), transposed
            p = tl.exp2(scores * scale_log2 - lse[None, :])
            visible = (columns < num_keys)[:, None]
            if CAUSAL:
                visible = visible & (rows[None, :] >= columns[:, None])
            p = tl.where(visible, p, 0.0)
            dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
            ds = (p * (dp - delta[None, :])).to(q.dtype)
            dk = tl.dot(ds, q, dk, input_precision=PRECISION)
            dq = tl.dot(tl.trans(ds), k, input_precision=PRECISION)  # (ROWS, MAIN)
            places = dq_view.source + rows.to(tl.int64)[:, None] * dq_view.stride + dims[None, :]
            tl.atomic_add(places, dq, mask=inside[:, None] & (dims < HEAD_DIM)[None, :], sem="relaxed")
    dk_view = tiles.view_head(dk_pointer, dk_batch, dk_head, dk_row, batch, kv_head, num_keys)
    dv_view = tiles.view_head(dv_pointer, dv_batch, dv_head, dv_row, batch, kv_head, num_keys)
    tiles.store_main(dk_view, dk * scale, column, COLUMNS, MAIN, HEAD_DIM)
    tiles.store_main(dv_view, dv, column, COLUMNS, MAIN, HEAD_DIM)
