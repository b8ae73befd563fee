"""Compute attention backward in portable Triton, deterministically, with two kernels.

With P = exp(S - lse) (FlashAttention-2, Dao 2023, algorithm 2):

    dV = P^T dO      dP = dO V^T      dS = P * (dP - delta)      dQ = dS K * scale      dK = dS^T Q * scale

`backward_dq` sums dQ over the keys, `backward_dkdv` sums dK and dV over the queries. Each sum is made by one CTA in
a fixed order: no atomics, the same bits every time. The price is computing S and dP twice: seven products instead
of five. `lmkit.core.attention.flash_torch` has the same formulas in PyTorch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmkit.kernels.flash.backward_dkdv import prepare_dkdv
from lmkit.kernels.flash.backward_dq import prepare_dq
from lmkit.kernels.flash.tuning import Tiling
from lmkit.kernels.launch import LaunchCache, Start, count_tiles, empty_in_order_of, prepare_launch

KEYS_AT_ONCE = 128  # of a program that searches last queries
PARTS = 16  # of what a step of the search has left, of which it finds the right one


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
    into: tuple[Tensor, Tensor, Tensor] | None = None,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv), in the memory order of q, k, v; the same bits on every run.

    Args:
        dout, out: (batch, heads, num_queries, head_dim), lse: (batch, heads, num_queries), of `flash_forward`; the
            others as there. All have stride 1 along head_dim.
        dq_tiling, dkdv_tiling: None takes the tilings that ship or were measured for this case.
        into: tensors shaped as q, k and v, of any strides that end in 1, which receive the gradients.
        first: as of `flash_forward`.
    """
    dq, dk, dv = into or (empty_in_order_of(q), empty_in_order_of(k), empty_in_order_of(v))
    delta = torch.empty_like(lse)
    places = None if into is None else tuple(x.stride() for x in into)
    has_first = first is not None
    bounds = (lse, lse) if first is None else (first, last_queries(first, k.shape[2]))
    options = (causal, scale, precision, dq_tiling, dkdv_tiling, has_first, places)
    backward_calls((q, k, v, out, dout, lse), (delta, dq, dk, dv, *bounds), options)
    return dq, dk, dv


def last_queries(first: Tensor, num_keys: int) -> Tensor:
    """Return the last query that sees each key: (batch, num_queries) values that never fall -> (batch, num_keys)
    int32."""
    last = first.new_empty(len(first), num_keys)
    last_calls((first,), (last,), (num_keys,))
    return last


@triton.jit(do_not_specialize=["part"])
def last_queries_kernel(first_pointer, last_pointer, num_queries, num_keys, part,
                        BLOCK: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """Search for the BLOCK keys of a program at once. `part`: queries of a part in the first step."""
    tiles = tl.cdiv(num_keys, BLOCK)
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    keys = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros((BLOCK,), tl.int32)  # the queries before it have a first key up to this one
    while part > 0:
        ends = low[:, None] + part * (1 + tl.arange(0, PARTS))[None, :] - 1
        first = tl.load(first_pointer + batch * num_queries + ends, mask=ends < num_queries, other=2147483647)
        low += part * tl.sum((first <= keys[:, None]).to(tl.int32), 1)
        part = part // PARTS
    tl.store(last_pointer + batch * num_keys + keys, low - 1, mask=keys < num_keys)


def _prepare_last(tensors: tuple[Tensor, ...], options: tuple) -> Start:
    (batch, num_queries), (num_keys,) = tensors[0].shape, options
    part = 1
    while part * PARTS < num_queries:
        part *= PARTS
    numbers = num_queries, num_keys, part
    grid = (batch * count_tiles(num_keys, KEYS_AT_ONCE), 1)
    return prepare_launch(
        last_queries_kernel, grid, tensors, numbers, {"BLOCK": KEYS_AT_ONCE, "PARTS": PARTS, "num_warps": 4}
    )


last_calls = LaunchCache(_prepare_last)


def prepare_backward(tensors: tuple[Tensor, ...], options: tuple) -> Start:
    """Return what computes dq, dk and dv in calls of this kind, from the pointers of the tensors."""
    q, k, v, out, dout, lse, delta, dq, dk, dv, first, last = tensors
    *common, dq_tiling, dkdv_tiling, has_first, _ = options
    start_queries = prepare_dq((q, k, v, out, dout, lse, delta, dq, first), (*common, dq_tiling, has_first))
    start_keys = prepare_dkdv(
        (q, k, v, dout, lse, delta, dk, dv, first, last), (*common, dkdv_tiling, has_first)
    )

    def start(q, k, v, out, dout, lse, delta, dq, dk, dv, first, last):
        start_queries(q, k, v, out, dout, lse, delta, dq, first)
        start_keys(q, k, v, dout, lse, delta, dk, dv, first, last)  # reads delta, which start_queries writes

    return start


backward_calls = LaunchCache(prepare_backward)
