"""Launches the backward kernels: the fast way adds dQ up in the order of arrival, the deterministic way computes it apart."""

import math
from dataclasses import dataclass

import torch
import triton

from lmkit.kernels.hopper.backward_kernel import key_value_gradient_kernel
from lmkit.kernels.hopper.backward_passes import ROWS as PASS_ROWS
from lmkit.kernels.hopper.backward_passes import finish_kernel, prepare_kernel
from lmkit.kernels.hopper.query_gradient_kernel import query_gradient_kernel
from lmkit.kernels.hopper.tensors import describe, empty_in_order_of, tma_strides

KEYS = 128
PADDING = 128  # rows of lse, delta and the sum of dQ are padded to whole tiles
REGISTERS = 168
HALF_P_SHIFT = 15  # binary places, see key_value_gradient_kernel


@dataclass(frozen=True)
class BackwardConfig:
    """What differs between head sizes: query rows of a step, P for dS in float16, slots for K in the dQ kernel."""

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
    dq, dk, dv = empty_in_order_of(q), empty_in_order_of(k), empty_in_order_of(v)
    padded = triton.cdiv(num_queries, PADDING) * PADDING
    flat_heads = batch * heads
    lse_log2, delta = torch.empty((2, flat_heads * padded), device=q.device, dtype=torch.float32)
    num_key_tiles = triton.cdiv(num_keys, KEYS)
    tail = num_keys % KEYS != 0
    scale_log2 = scale * math.log2(math.e)
    shift = HALF_P_SHIFT if config.half_p and q.dtype == torch.bfloat16 else 0  # float16 dS has no range to spare
    unshift = 2.0**-shift
    rows, keys = (1, 1, config.queries, head_dim), (1, 1, KEYS, head_dim)
    if deterministic:
        # never written: the kernel asks for a descriptor of the sum of dQ even where it adds nothing to it
        dq_sum = torch.empty((PADDING, head_dim), device=q.device, dtype=torch.float32)
        query_gradient_kernel[(padded // PADDING * flat_heads,)](
            describe(q, keys),
            describe(k, keys),
            describe(v, keys),
            describe(dout, keys),
            describe(dq, keys),
            lse,
            lse_log2,
            delta,
            out,
            *out.stride()[:3],
            num_queries,
            num_keys,
            padded,
            heads,
            heads // key_heads,
            padded // PADDING,
            scale_log2,
            scale,
            float(shift),
            D=head_dim,
            K_STAGES=config.dq_k_stages,
            CAUSAL=causal,
            TAIL=tail,
            num_warps=8,
            maxnreg=REGISTERS,
            launch_pdl=True,
        )
    else:
        dq_sum = torch.empty((flat_heads * padded, head_dim), device=q.device, dtype=torch.float32)
        prepare_kernel[(padded // PASS_ROWS, flat_heads)](
            out,
            dout,
            lse,
            lse_log2,
            delta,
            dq_sum,
            num_queries,
            padded,
            heads,
            float(shift),
            *out.stride()[:3],
            *dout.stride()[:3],
            D=head_dim,
            ROWS=PASS_ROWS,
            launch_pdl=True,
        )
    key_value_gradient_kernel[(num_key_tiles * batch * key_heads,)](
        describe(q, rows),
        describe(k, keys),
        describe(v, keys),
        describe(dout, rows),
        describe(lse_log2, (config.queries,)),
        describe(delta, (config.queries,)),
        describe(dk, keys),
        describe(dv, keys),
        describe(dq_sum.view(-1, 32), (config.queries * head_dim // 32, 32)),
        num_queries,
        num_keys,
        padded,
        heads,
        heads // key_heads,
        triton.cdiv(num_queries, config.queries),
        num_key_tiles,
        scale_log2,
        scale * unshift,
        unshift,
        QUERIES=config.queries,
        D=head_dim,
        CAUSAL=causal,
        TAIL=tail,
        ADD_DQ=not deterministic,
        HALF_P=config.half_p,
        num_warps=8,
        maxnreg=REGISTERS,
        launch_pdl=True,
    )
    if not deterministic:
        finish_kernel[(padded // PASS_ROWS, flat_heads)](
            dq_sum,
            dq,
            num_queries,
            padded,
            heads,
            *dq.stride()[:3],
            scale * unshift,
            D=head_dim,
            ROWS=PASS_ROWS,
            launch_pdl=True,
        )
    return dq, dk, dv
