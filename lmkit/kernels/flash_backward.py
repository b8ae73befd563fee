"""The backward pass of FlashAttention-2 in portable Triton: two kernels, deterministic.

With P = exp(S - lse), as "FlashAttention-2" (Dao 2023, algorithm 2) has it:

    dV = P^T dO      dP = dO V^T      dS = P * (dP - delta)      dQ = dS K * scale      dK = dS^T Q * scale

One kernel sums dQ over the keys, the other dK and dV over the queries. Each sum is made by one program in a fixed
order: no atomics, the same bits every time, for the price of computing S and dP twice (seven products, not five).
"""

from torch import Tensor

from lmkit.kernels.flash_key_gradients import key_gradients
from lmkit.kernels.flash_query_gradient import query_gradient
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
    dq, delta = query_gradient(
        dout, q, k, v, out, lse, causal=causal, scale=scale, precision=precision, tiling=dq_tiling
    )
    dk, dv = key_gradients(
        dout, q, k, v, lse, delta, causal=causal, scale=scale, precision=precision, tiling=dkdv_tiling
    )
    return dq, dk, dv
