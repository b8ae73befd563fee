"""Launches the forward kernel: configuration, tensors, grid."""

import functools
import math
from dataclasses import dataclass

import torch
import triton

from lmkit.kernels.hopper.devices import num_multiprocessors, selected
from lmkit.kernels.hopper.forward_kernel import ROWS as CONSUMER_ROWS
from lmkit.kernels.hopper.forward_kernel import forward_kernel
from lmkit.kernels.hopper.launches import Boxes, prepare_launch
from lmkit.kernels.hopper.support import used_of, width_of
from lmkit.kernels.hopper.tensors import box_strides, strides_in_order_of

ROWS = CONSUMER_ROWS.value
# Registers a thread at launch, and a consumer's after it has taken the producer's share, by the number of
# consumers
REGISTERS = {2: (168, 240), 3: (128, 160)}
PREPARED_CALLS = 1024  # kept; a model has a few


@dataclass(frozen=True)
class ForwardConfig:
    """Consumers (64 query rows each), slots for K and for V, and keys of a block; whether O has a tile of its
    own or leaves through Q's (which keeps the next Q waiting)."""

    consumers: int
    stages: int
    keys: int = 128
    own_o: bool = True


HEAD_DIM_256 = ForwardConfig(consumers=2, stages=2, keys=64, own_o=False)
HEAD_DIM_128 = ForwardConfig(consumers=2, stages=2)
HEAD_DIM_64 = ForwardConfig(consumers=3, stages=3)
# Tiles of 192 queries reach too far beyond the diagonal, or the end, of a short sequence.
HEAD_DIM_64_SHORT = ForwardConfig(consumers=2, stages=4)
SHORT_CAUSAL = 2048  # queries
SHORT_FULL = 768


def choose_config(width: int, num_queries: int, causal: bool) -> ForwardConfig:
    """The fastest of the shipped configurations, as measured on an H200 with heads of 64, 128 and 256."""
    if width > 64:
        return HEAD_DIM_256 if width == 256 else HEAD_DIM_128
    if num_queries < (SHORT_CAUSAL if causal else SHORT_FULL):
        return HEAD_DIM_64_SHORT
    return HEAD_DIM_64


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k^T scale) v and the log-sum-exp of the scores (float32 (batch, heads, num_queries),
    natural).

    q: (batch, heads, num_queries, head_dim); k, v: (batch, key_heads, num_keys, head_dim). Whether the
    kernel can run is `unsupported_reason`'s to say; here it is taken for granted.
    """
    shape, dtype, device = q.shape, q.dtype, q.device
    with selected(device):
        out_strides, lse_shape, lse_strides, launch = _prepare(
            shape, q.stride(), k.shape, k.stride(), v.stride(), dtype, device, causal, scale
        )
        out = torch.empty_strided(shape, out_strides, dtype=dtype, device=device)
        # `torch.empty` of a shape takes nearly twice the host time
        lse = torch.empty_strided(lse_shape, lse_strides, dtype=torch.float32, device=device)
        launch(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr())
    return out, lse


@functools.lru_cache(maxsize=PREPARED_CALLS)
def _prepare(q_shape, q_strides, k_shape, k_strides, v_strides, dtype, device, causal, scale):
    """(strides of the output, shape and strides of the log-sum-exp, launch) for calls of this kind."""
    batch, heads, num_queries, head_dim = q_shape
    num_keys = k_shape[2]
    width = width_of(head_dim)
    config = choose_config(width, num_queries, causal)
    registers, consumer_registers = REGISTERS[config.consumers]
    num_tiles = triton.cdiv(num_queries, ROWS * config.consumers)
    units = batch * heads * ((num_tiles + 1) // 2 if causal else num_tiles)
    rows, keys = (1, 1, ROWS, width), (1, 1, config.keys, width)
    out_strides = strides_in_order_of(q_shape, q_strides)

    def boxes(shape, strides, box):
        return Boxes(shape, box_strides(shape, strides, dtype.itemsize), dtype, box)

    launch = prepare_launch(
        forward_kernel,
        (min(units, num_multiprocessors(device)), 1),
        [
            *(boxes(q_shape, q_strides, rows), boxes(k_shape, k_strides, keys)),
            *(boxes(k_shape, v_strides, keys), boxes(q_shape, out_strides, rows), torch.float32),
        ],
        (
            *(num_queries, num_keys, heads, heads // k_shape[1], num_tiles, batch * heads),
            scale * math.log2(math.e),
        ),
        (
            *(width, used_of(head_dim), config.keys, config.stages, causal, num_keys % config.keys != 0),
            *(config.consumers, config.own_o, consumer_registers),
        ),
        num_warps=4,
        maxnreg=registers,
        launch_pdl=True,
    )
    return out_strides, q_shape[:3], (heads * num_queries, num_queries, 1), launch
