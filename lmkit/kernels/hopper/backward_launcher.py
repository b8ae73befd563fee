"""Launches the backward kernels: the fast way adds dQ up in the order of arrival, the deterministic way
computes it apart."""

import math
from dataclasses import dataclass

import torch
import triton

from lmkit.kernels.hopper.backward_kernel import key_value_gradient_kernel
from lmkit.kernels.hopper.backward_passes import ROWS as PASS_ROWS
from lmkit.kernels.hopper.backward_passes import finish_kernel, prepare_kernel
from lmkit.kernels.hopper.devices import selected
from lmkit.kernels.hopper.launches import Launch
from lmkit.kernels.hopper.query_gradient_kernel import query_gradient_kernel
from lmkit.kernels.hopper.tensors import describe, empty_in_order_of, tma_strides

KEYS = 128
PADDING = 128  # rows of lse, delta and the sum of dQ are padded to whole tiles
REGISTERS = 168
HALF_P_SHIFT = 15.0  # binary places, see key_value_gradient_kernel


_launch_prepare = Launch(prepare_kernel, num_warps=4, launch_pdl=True)
_launch_finish = Launch(finish_kernel, num_warps=4, launch_pdl=True)
_launch_key_value_gradient = Launch(
    key_value_gradient_kernel, num_warps=8, maxnreg=REGISTERS, launch_pdl=True
)
_launch_query_gradient = Launch(query_gradient_kernel, num_warps=8, maxnreg=REGISTERS, launch_pdl=True)


@dataclass(frozen=True)
class BackwardConfig:
    """What differs between head sizes: query rows of a step, P for dS in float16, slots for K in the dQ
    kernel."""

    queries: int
    half_p: bool
    dq_k_stages: int


CONFIGS = {
    64: BackwardConfig(queries=128, half_p=True, dq_k_stages=3),
    128: BackwardConfig(queries=64, half_p=False, dq_k_stages=2),
}


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
    if tma_strides(dout) is None:
        dout = dout.contiguous()
    batch, heads, num_queries, head_dim = q.shape
    _, key_heads, num_keys, _ = k.shape
    config = CONFIGS[head_dim]
    group = heads // key_heads
    flat_heads = batch * heads
    padded = triton.cdiv(num_queries, PADDING) * PADDING
    num_key_tiles = triton.cdiv(num_keys, KEYS)
    num_query_tiles = triton.cdiv(num_queries, config.queries)
    tail = num_keys % KEYS != 0
    scale_log2 = scale * math.log2(math.e)
    shift = (
        HALF_P_SHIFT if config.half_p and q.dtype == torch.bfloat16 else 0.0
    )  # float16 dS has no range to spare
    unshift = 2.0**-shift
    rows, keys = (1, 1, config.queries, head_dim), (1, 1, KEYS, head_dim)
    with selected(q.device):
        dq, dk, dv = empty_in_order_of(q), empty_in_order_of(k), empty_in_order_of(v)
        lse_log2, delta = torch.empty((2, flat_heads * padded), device=q.device, dtype=torch.float32)
        # Where nothing is added up, the kernel still wants a descriptor of the sum
        sum_rows = PADDING if deterministic else flat_heads * padded
        dq_sum = torch.empty((sum_rows, head_dim), device=q.device, dtype=torch.float32)
        if deterministic:
            _launch_query_gradient(
                (flat_heads * padded // PADDING, 1),
                q.dtype,
                (
                    *(describe(tensor, keys) for tensor in (q, k, v, dout, dq)),
                    *(lse, lse_log2, delta, out, *_strides(out)),
                    *(num_queries, num_keys, padded, heads, group, padded // PADDING),
                    *(scale_log2, scale, shift),
                ),
                (head_dim, config.dq_k_stages, causal, tail),
            )
        else:
            _launch_prepare(
                (flat_heads, padded // PASS_ROWS),
                q.dtype,
                (
                    *(out, dout, lse, lse_log2, delta, dq_sum),
                    *(num_queries, padded, heads, shift, *_strides(out), *_strides(dout)),
                ),
                (head_dim, PASS_ROWS),
            )
        _launch_key_value_gradient(
            (batch * key_heads * num_key_tiles, 1),
            q.dtype,
            (
                *(describe(q, rows), describe(k, keys), describe(v, keys), describe(dout, rows)),
                *(describe(lse_log2, (config.queries,)), describe(delta, (config.queries,))),
                *(describe(dk, keys), describe(dv, keys)),
                describe(dq_sum.view(-1, 32), (config.queries * head_dim // 32, 32)),
                *(num_queries, num_keys, padded, heads, group, num_query_tiles, num_key_tiles),
                *(scale_log2, scale * unshift, unshift),
            ),
            (config.queries, head_dim, causal, tail, not deterministic, config.half_p),
        )
        if not deterministic:
            _launch_finish(
                (flat_heads, padded // PASS_ROWS),
                q.dtype,
                (dq_sum, dq, num_queries, padded, heads, *_strides(dq), scale * unshift),
                (head_dim, PASS_ROWS),
            )
    return dq, dk, dv


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """(batch, head, row) strides in units of 8 elements."""
    strides = tma_strides(tensor)
    assert strides is not None, f"strides {tensor.stride()} do not suit"
    return tuple(stride // 8 for stride in strides[:3])
