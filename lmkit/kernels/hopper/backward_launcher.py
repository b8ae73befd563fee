"""Launches the backward kernels: the fast way adds dQ up in the order of arrival, the deterministic way
computes it apart."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton

from lmkit.kernels.hopper.backward_kernel import key_value_gradient_kernel
from lmkit.kernels.hopper.backward_passes import ROWS as PASS_ROWS
from lmkit.kernels.hopper.backward_passes import finish_kernel, prepare_kernel
from lmkit.kernels.hopper.devices import selected
from lmkit.kernels.hopper.forward_launcher import PREPARED_CALLS
from lmkit.kernels.hopper.launches import Boxes, prepare_launch
from lmkit.kernels.hopper.narrow_gradient_kernel import narrow_gradient_kernel
from lmkit.kernels.hopper.query_gradient_kernel import query_gradient_kernel
from lmkit.kernels.hopper.support import used_of, width_of
from lmkit.kernels.hopper.tensors import box_strides, strides_in_order_of, suits_copy_engine
from lmkit.kernels.hopper.wide_gradient_kernel import wide_gradient_kernel

PADDING = 128  # rows of lse, delta and the sum of dQ are padded to whole tiles
REGISTERS = 168  # a thread at launch
CONSUMER_REGISTERS = 240  # of a second consumer that is a partition, after it took the producer's share
# Causal blocks of as many heads start together, longest first (tiles.locate_longest_first), as have this many
# tokens: enough to fill the gaps at the end, few enough that what they share stays in L2.
TOKENS_TOGETHER = 16384


@dataclass(frozen=True)
class BackwardConfig:
    """What differs between the widths of heads.

    queries, keys: of a step of the dK/dV kernel; packed_p: see there. query_*: keys and slots of the dQ
    kernel. wide: dK and dV are `wide_gradient_kernel`'s, always deterministic.
    """

    queries: int
    keys: int
    packed_p: bool
    query_keys: int
    query_k_stages: int
    query_v_stages: int
    wide: bool = False


CONFIGS = {
    64: BackwardConfig(queries=128, keys=128, packed_p=True, query_keys=128, query_k_stages=3, query_v_stages=2),
    128: BackwardConfig(queries=64, keys=128, packed_p=False, query_keys=128, query_k_stages=2, query_v_stages=2),
    256: BackwardConfig(queries=64, keys=64, packed_p=False, query_keys=64, query_k_stages=2, query_v_stages=1,
                        wide=True),
}  # fmt: skip


def takes_narrow(head_dim: int, num_queries: int, num_keys: int, causal: bool, dtype: torch.dtype) -> bool:
    """Whether the fast way of such calls is `narrow_gradient_kernel`'s."""
    # At 128 it is 1.04, 1.07, 1.08 and 1.09 times as fast without a mask at 2k, 4k, 8k and 16k (H200), but 0.98 at
    # 1k, 0.95 with 8k queries and 1k keys, and 0.95 to 0.98 with a mask. float16 was not timed; its errors are larger
    # by a tenth. It does not leave out the zeros of narrower heads (products.issue_scores).
    is_long_and_full = min(num_queries, num_keys) >= 2048 and not causal
    return width_of(head_dim) == 64 or (head_dim == 128 and is_long_and_full and dtype == torch.bfloat16)


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool,
    scale: float,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) of `forward`, from its own out and lse; the same bits every time if deterministic.

    Shapes as there; dk and dv sum over the query heads that share a key head. A dout that the copy engine
    cannot take (an expanded one, say) is copied first.
    """
    if not suits_copy_engine(dout):
        dout = dout.contiguous()
    q_shape, k_shape, dtype, device = q.shape, k.shape, q.dtype, q.device
    with selected(device):
        dq_strides, dk_strides, dv_strides, scratch_size, start = _prepare(
            *(q_shape, q.stride(), k_shape, k.stride(), v.stride(), out.stride(), dout.stride()),
            *(dtype, device, causal, scale, deterministic),
        )
        dq = torch.empty_strided(q_shape, dq_strides, dtype=dtype, device=device)
        dk = torch.empty_strided(k_shape, dk_strides, dtype=dtype, device=device)
        dv = torch.empty_strided(k_shape, dv_strides, dtype=dtype, device=device)
        scratch = torch.empty(scratch_size, dtype=torch.float32, device=device)
        start(
            *(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(), dout.data_ptr()),
            *(dq.data_ptr(), dk.data_ptr(), dv.data_ptr(), scratch.data_ptr()),
        )
    return dq, dk, dv


@functools.lru_cache(maxsize=PREPARED_CALLS)
def _prepare(
    q_shape: tuple[int, ...],
    q_strides: tuple[int, ...],
    k_shape: tuple[int, ...],
    k_strides: tuple[int, ...],
    v_strides: tuple[int, ...],
    out_strides: tuple[int, ...],
    dout_strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    causal: bool,
    scale: float,
    deterministic: bool,
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int, Callable[..., None]]:
    """(strides of dq, dk, dv; float32 numbers of scratch; what launches the kernels) for calls of this kind."""
    batch, heads, num_queries, head_dim = q_shape
    _, key_heads, num_keys, _ = k_shape
    width, used = width_of(head_dim), used_of(head_dim)
    config = CONFIGS[width]
    group = heads // key_heads
    flat_heads = batch * heads
    padded = triton.cdiv(num_queries, PADDING) * PADDING
    num_query_tiles = triton.cdiv(num_queries, config.queries)
    num_key_tiles = triton.cdiv(num_keys, config.keys)
    scale_log2 = scale * math.log2(math.e)
    # Without a mask all blocks are equally long: one head after the other
    together = max(1, TOKENS_TOGETHER // max(num_queries, num_keys)) if causal else 1
    dq_strides = strides_in_order_of(q_shape, q_strides)
    dk_strides, dv_strides = strides_in_order_of(k_shape, k_strides), strides_in_order_of(k_shape, v_strides)
    shared = (num_queries, num_keys, padded, batch, heads, group, together)
    options = {"maxnreg": REGISTERS, "launch_pdl": True}
    adds_dq = not (deterministic or config.wide)
    narrow = adds_dq and takes_narrow(head_dim, num_queries, num_keys, causal, dtype)

    def queries(strides, rows):
        return Boxes(q_shape, box_strides(q_shape, strides, dtype.itemsize), dtype, (1, 1, rows, width))

    def keys(strides, rows):
        return Boxes(k_shape, box_strides(k_shape, strides, dtype.itemsize), dtype, (1, 1, rows, width))

    def eighths(strides):
        return tuple(stride // 8 for stride in box_strides(q_shape, strides, dtype.itemsize)[:3])

    # The scratch: lse in log2 units, delta, and where dQ is added up its sum
    plane = flat_heads * padded
    delta_offset, sum_offset = 4 * plane, 8 * plane  # bytes; a plane is a multiple of 512 bytes
    sum_rows = plane * width // 32 if adds_dq else config.queries * width // 32  # or what one box needs
    rows = Boxes((plane,), (1,), torch.float32, (config.queries,))
    if narrow and width == 128:  # each consumer adds up 64 of the columns, half of every 16 queries' 64 rows
        dq_sum = Boxes((plane // 16, 64, 32), (64 * 32, 32, 1), torch.float32, (config.queries // 16, 32, 32))
    else:  # or of 64 of the queries all, if narrow
        part_queries = config.queries // 2 if narrow else config.queries
        dq_sum = Boxes((sum_rows, 32), (32, 1), torch.float32, (part_queries * width // 32, 32))
    part_keys = config.keys // 2 if narrow else config.keys  # there each consumer copies its own
    inputs = [queries(q_strides, config.queries), keys(k_strides, part_keys), keys(v_strides, part_keys),
              queries(dout_strides, config.queries), rows, rows]  # fmt: skip
    outputs = [keys(dk_strides, part_keys), keys(dv_strides, part_keys)]
    key_grid = (batch * key_heads * num_key_tiles, 1)
    key_scalars = (*shared, num_query_tiles, num_key_tiles, scale_log2, scale)
    ragged = num_keys % config.keys != 0
    if config.wide:
        launch_keys = prepare_launch(
            wide_gradient_kernel, key_grid, [*inputs, *outputs], key_scalars,
            (width, used, causal, CONSUMER_REGISTERS), num_warps=4, **options)  # fmt: skip
    elif narrow:
        launch_keys = prepare_launch(
            narrow_gradient_kernel, key_grid, [*inputs, *outputs, dq_sum], key_scalars,
            (causal, ragged, CONSUMER_REGISTERS), num_warps=4, **options)  # fmt: skip
    else:
        launch_keys = prepare_launch(
            key_value_gradient_kernel, key_grid, [*inputs, *outputs, dq_sum], key_scalars,
            (config.queries, width, used, causal, ragged, adds_dq, config.packed_p),
            num_warps=8, **options)  # fmt: skip
    if adds_dq:
        pass_grid = (flat_heads, padded // PASS_ROWS)
        launch_prepare = prepare_launch(
            prepare_kernel, pass_grid, [dtype, dtype, *[torch.float32] * 4],
            (num_queries, padded, heads, scale, *eighths(out_strides), *eighths(dout_strides)),
            (width, head_dim, PASS_ROWS), num_warps=4, launch_pdl=True)  # fmt: skip
        launch_finish = prepare_launch(
            finish_kernel, pass_grid, [torch.float32, dtype],
            (num_queries, padded, heads, *eighths(dq_strides)),
            (width, head_dim, PASS_ROWS), num_warps=4, launch_pdl=True)  # fmt: skip
    else:
        launch_queries = prepare_launch(
            query_gradient_kernel, (plane // PADDING, 1),
            [queries(q_strides, PADDING), keys(k_strides, config.query_keys), keys(v_strides, config.query_keys),
             queries(dout_strides, PADDING), queries(dq_strides, PADDING), *[torch.float32] * 3, dtype],
            (*eighths(out_strides), *shared, padded // PADDING, scale_log2, scale),
            (width, head_dim, used, config.query_keys, config.query_k_stages, config.query_v_stages, causal,
             num_keys % config.query_keys != 0), num_warps=8, **options)  # fmt: skip

    def start(q, k, v, out, lse, dout, dq, dk, dv, lse_log2):
        delta, total = lse_log2 + delta_offset, lse_log2 + sum_offset
        if adds_dq:
            launch_prepare(out, dout, lse, lse_log2, delta, total)
            launch_keys(q, k, v, dout, lse_log2, delta, dk, dv, total)
            launch_finish(total, dq)
        else:
            launch_queries(q, k, v, dout, dq, lse, lse_log2, delta, out)
            if config.wide:
                launch_keys(q, k, v, dout, lse_log2, delta, dk, dv)
            else:
                launch_keys(q, k, v, dout, lse_log2, delta, dk, dv, total)

    return dq_strides, dk_strides, dv_strides, 2 * plane + 32 * sum_rows, start
