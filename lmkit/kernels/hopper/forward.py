"""Compute attention forward on Hopper: which calls these kernels take; choose and launch a variant of the kernel.

Head sizes. The kernels are written for heads of 64, 128 and 256 numbers. Others take the next of these WIDTHS: TMA
knows the tensors' true shape, fills the boxes up with zeros, which add nothing to any product, and does not write
beyond the head. The price is products with zeros, at worst half of them (136 in 256). Products whose sum goes over
the columns, S = Q K^T and dP = dO V^T, leave most of the zeros out (`used_of`).

* Multiples of 8: dense tensors of such heads, the outputs among them, have the 16-byte strides that TMA takes.
* From 40 on: below, the portable kernels are faster.
"""

import functools
import math
from typing import NamedTuple

import torch
import triton

from lmkit.kernels.hopper.forward_kernel import ROWS as CONSUMER_ROWS
from lmkit.kernels.hopper.forward_kernel import forward_kernel
from lmkit.kernels.hopper.tma import ALIGNMENT_BYTES, head_boxes, tma_strides
from lmkit.kernels.launch import (
    capability,
    count_sms,
    count_tiles,
    prepare_launch,
    selected,
    strides_in_order_of,
)
from lmkit.kernels.versions import HOPPER_OPTIONS, hopper_assembler

WIDTHS = (64, 128, 256)  # of the heads that the kernels are written for
HEAD_DIMS = range(40, WIDTHS[-1] + 1, 8)
DTYPES = (torch.bfloat16, torch.float16)
CAPABILITY = (9, 0)


def width_of(head_dim: int) -> int:
    """Return the width that heads of this supported size take in the kernels; columns beyond head_dim are zeros."""
    return next(width for width in WIDTHS if head_dim <= width)


def used_of(head_dim: int) -> int:
    """Return how many of `width_of(head_dim)` columns the products that sum over columns take (`issue_scores`): half
    of them plus a power of two, at least the 16 of one wgmma."""
    half = width_of(head_dim) // 2
    return half + next(rest for rest in (16, 32, 64, 128) if head_dim <= half + rest)


def unsupported_reason(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """Return why these kernels cannot run on q, k, v ((batch, heads, seq, head_dim) each), or None if they can."""
    reason = _unsupported_kind(
        *((q.device, k.device, v.device), (q.dtype, k.dtype, v.dtype)),
        *((q.shape, k.shape, v.shape), (q.stride(), k.stride(), v.stride())),
    )
    if reason is None and (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT_BYTES:
        return f"the addresses of q, k, v are not all multiples of {ALIGNMENT_BYTES} bytes"
    return reason


@functools.lru_cache(maxsize=1024)  # every call asks, and the answers cost microseconds
def _unsupported_kind(
    devices: tuple[torch.device, ...],
    dtypes: tuple[torch.dtype, ...],
    shapes: tuple[torch.Size, ...],
    strides: tuple[tuple[int, ...], ...],
) -> str | None:
    """Return why no call with such q, k, v can run, whatever their addresses. Each argument has three entries."""
    (device, *_), (dtype, *_), (q, k, v) = devices, dtypes, shapes
    if device.type != "cuda" or len(set(devices)) > 1:
        return f"q, k, v are on {', '.join(map(str, devices))}, not on one CUDA device"
    if capability(device) != CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is not a Hopper GPU (compute capability 9.0)"
    if dtype not in DTYPES or len(set(dtypes)) > 1:
        return f"dtypes are {', '.join(map(str, dtypes))}; bfloat16 or float16 is supported"
    if not (q[-1] == k[-1] == v[-1] and q[-1] in HEAD_DIMS):
        listed = f"multiples of {HEAD_DIMS.step} from {HEAD_DIMS.start} to {HEAD_DIMS[-1]}"
        return f"head_dim is {q[-1]}; {listed} are supported"
    if k != v or q[0] != k[0] or k[1] == 0 or q[1] % k[1]:
        return f"shapes {tuple(q)}, {tuple(k)}, {tuple(v)} do not belong together"
    if q.numel() == 0 or k.numel() == 0:
        return "there are no queries or no keys"
    for name, shape, stride in zip("qkv", shapes, strides, strict=True):
        if tma_strides(shape, stride, dtype.itemsize) is None:
            return f"strides {stride} of {name} do not suit TMA (multiples of 16 bytes, unit last)"
    return None


# Registers a thread at launch, and of a consumer after it has taken the producer's share, by the number of
# consumers.
REGISTERS = {2: (168, 240), 3: (128, 160)}
_COUNTERS: dict[tuple[torch.device, int], torch.Tensor] = {}  # by device and stream
_STOCK: dict[torch.device, list[torch.Tensor]] = {}  # counters not in use yet
_STOCKS: list[torch.Tensor] = []  # all that were made: graphs hold addresses of counters, and only those
STOCK = 4096  # counters of a device that are made at once, 16 bytes each
PREPARED_CALLS = 1024  # kinds of calls that are kept; a model has a few


class ForwardConfig(NamedTuple):
    """A variant of the kernel.

    consumers: warp groups of 64 query rows; stages: slots for K and for V; keys: of a block; own_o: O has tiles of
    its own in shared memory, otherwise it leaves through Q's, which keeps the next Q waiting.
    """

    consumers: int
    stages: int
    keys: int = 128
    own_o: bool = True


CONFIGS = {
    64: ForwardConfig(consumers=3, stages=3),
    128: ForwardConfig(consumers=2, stages=2),
    256: ForwardConfig(consumers=2, stages=2, keys=64, own_o=False),
}
# Tiles of 192 queries reach too far beyond the diagonal, or the end, of a short sequence.
SHORT_CONFIG = ForwardConfig(consumers=2, stages=4)
SHORT_CAUSAL, SHORT_FULL = 2048, 768  # queries


def choose_config(width: int, num_queries: int, causal: bool) -> ForwardConfig:
    """Return the fastest variant, as measured on an H200 with heads of 64, 128 and 256."""
    is_short = num_queries < (SHORT_CAUSAL if causal else SHORT_FULL)
    return SHORT_CONFIG if width == 64 and is_short else CONFIGS[width]


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float,
    first: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return softmax(q k^T scale) v, in q's memory order, and the natural log-sum-exp of the scores, float32 (batch,
    heads, num_queries). Does not check again what `unsupported_reason` refuses.

    Args:
        q: (batch, heads, num_queries, head_dim); k, v: (batch, key_heads, num_keys, head_dim).
        first: as of `lmkit.kernels.flash.forward.flash_forward`.
    """
    shape, dtype, device = q.shape, q.dtype, q.device
    with selected(device):
        out_strides, lse_shape, lse_strides, launch = _prepare(
            *(shape, q.stride(), k.shape, k.stride(), v.stride(), dtype, device, causal, scale),
            first is not None,
        )
        out = torch.empty_strided(shape, out_strides, dtype=dtype, device=device)
        # `torch.empty` of a shape takes nearly twice the host time.
        lse = torch.empty_strided(lse_shape, lse_strides, dtype=torch.float32, device=device)
        bounds = lse if first is None else aligned(first)
        drawn = lse if first is None else counter_of_stream(device)
        launch(*[x.data_ptr() for x in (q, k, v, out, lse, bounds, drawn)])
    return out, lse


def aligned(bounds: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor whose address suits the kernels: itself, or a copy."""
    return bounds.clone() if bounds.data_ptr() % ALIGNMENT_BYTES else bounds


def counter_of_stream(device: torch.device) -> torch.Tensor:
    """Return the counter of `schedule.draw_unit` for a call on the current stream of this device: 0, int32.

    Calls of a stream share it: each leaves it at 0. A call in a graph gets its own, because graphs that one stream
    captured may be replayed on several; it comes from a stock made before the capture, or the graph sets it to 0 in
    every replay, which takes time.
    """
    captured = torch.cuda.is_current_stream_capturing()
    stock = _STOCK.setdefault(device, [])
    if not stock and not captured:
        _STOCKS.append(torch.zeros(STOCK, ALIGNMENT_BYTES // 4, dtype=torch.int32, device=device))
        stock += _STOCKS[-1].unbind()
        torch.cuda.current_stream(device).synchronize()  # other streams may be the first to use them
    if captured:
        return stock.pop() if stock else torch.zeros(1, dtype=torch.int32, device=device)
    stream = triton.runtime.driver.active.get_current_stream(torch.cuda.current_device())
    counter = _COUNTERS.get((device, stream))
    if counter is None:
        counter = _COUNTERS.setdefault((device, stream), stock.pop())
    return counter


@functools.lru_cache(maxsize=PREPARED_CALLS)
def _prepare(q_shape, q_strides, k_shape, k_strides, v_strides, dtype, device, causal, scale, has_first):
    """Return (strides of out, shape and strides of lse, launch) for calls of this kind."""
    batch, heads, num_queries, head_dim = q_shape
    num_keys = k_shape[2]
    width = width_of(head_dim)
    config = choose_config(width, num_queries, causal)
    registers, consumer_registers = REGISTERS[config.consumers]
    num_tiles = count_tiles(num_queries, CONSUMER_ROWS.value * config.consumers)
    units = batch * heads * ((num_tiles + 1) // 2 if causal and not has_first else num_tiles)
    out_strides = strides_in_order_of(q_shape, q_strides)
    tensors = [
        head_boxes(q_shape, q_strides, dtype, CONSUMER_ROWS.value, width),
        head_boxes(k_shape, k_strides, dtype, config.keys, width),
        head_boxes(k_shape, v_strides, dtype, config.keys, width),
        head_boxes(q_shape, out_strides, dtype, CONSUMER_ROWS.value, width),
        *(torch.float32, torch.int32, torch.int32),
    ]
    sizes = (num_queries, num_keys, heads, heads // k_shape[1], num_tiles, batch * heads)
    numbers = (*sizes, scale * math.log2(math.e))
    of_call = {"CAUSAL": causal, "FIRST": has_first, "TAIL": num_keys % config.keys != 0}
    partitions = {"CONSUMERS": config.consumers, "REGISTERS": consumer_registers, "num_warps": 4}
    memory = {"KEYS": config.keys, "STAGES": config.stages, "OWN_O": config.own_o}
    options = {"maxnreg": registers, "launch_pdl": True, **HOPPER_OPTIONS}
    constants = {"D": width, "USED": used_of(head_dim), **of_call, **partitions, **memory, **options}
    grid = (min(units, count_sms(device)), 1)
    with hopper_assembler():
        launch = prepare_launch(forward_kernel, grid, tensors, numbers, constants)
    return out_strides, q_shape[:3], (heads * num_queries, num_queries, 1), launch
