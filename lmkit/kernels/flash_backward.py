"""The backward pass of FlashAttention-2 in portable Triton: two kernels, deterministic.

With P = exp(S - lse), as "FlashAttention-2" (Dao 2023, algorithm 2) has it:

    dV = P^T dO      dP = dO V^T      dS = P * (dP - delta)      dQ = dS K * scale      dK = dS^T Q * scale

One kernel sums dQ over the keys, the other dK and dV over the queries. Each sum is made by one program in a fixed
order: no atomics, the same bits every time, for the price of computing S and dP twice (seven products, not five).
"""

import torch
from torch import Tensor

from lmkit.kernels.flash_key_gradients import prepare_key_gradients
from lmkit.kernels.flash_query_gradient import prepare_query_gradient
from lmkit.kernels.launching import Calls, Start, empty_in_order_of
from lmkit.kernels.tilings import Tiling


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
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), strided as q, k, v; the same bits on every run.

    Args:
        dout, out: (batch, heads, num_queries, head_dim), lse: (batch, heads, num_queries), of `flash_forward`; the
            others as there. All have stride 1 along head_dim.
        dq_tiling, dkdv_tiling: None takes those that ship or were measured for this case.
    """
    dq, dk, dv, delta = (
        empty_in_order_of(q),
        empty_in_order_of(k),
        empty_in_order_of(v),
        torch.empty_like(lse),
    )
    options = (causal, scale, precision, dq_tiling, dkdv_tiling)
    backward_calls((q, k, v, out, dout, lse), (delta, dq, dk, dv), options)
    return dq, dk, dv


def prepare_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    causal: bool,
    scale: float,
    precision: str,
    dq_tiling: Tiling | None,
    dkdv_tiling: Tiling | None,
) -> Start:
    """What computes dq, dk and dv in calls of this kind, from the pointers of the ten tensors."""
    options = (causal, scale, precision)
    start_queries = prepare_query_gradient(q, k, v, out, dout, lse, delta, dq, *options, dq_tiling)
    start_keys = prepare_key_gradients(q, k, v, dout, lse, delta, dk, dv, *options, dkdv_tiling)

    def start(
        q: int, k: int, v: int, out: int, dout: int, lse: int, delta: int, dq: int, dk: int, dv: int
    ) -> None:
        start_queries(q, k, v, out, dout, lse, delta, dq)
        start_keys(q, k, v, dout, lse, delta, dk, dv)  # after the queries', which leave delta

    return start


backward_calls = Calls(prepare_backward)
