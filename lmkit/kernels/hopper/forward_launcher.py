"""Launches the forward kernel: configuration, descriptors, grid."""

import math
from dataclasses import dataclass

import torch
import triton

from lmkit.kernels.hopper.devices import num_multiprocessors, selected
from lmkit.kernels.hopper.forward_kernel import forward_kernel
from lmkit.kernels.hopper.launches import Launch
from lmkit.kernels.hopper.tensors import describe, empty_in_order_of

ROWS = 64  # query rows of a consumer
KEYS = 128
# Registers a thread at launch, and a consumer's after it has taken the producer's share, by the number of
# consumers
REGISTERS = {2: (168, 240), 3: (128, 160)}


_launch = Launch(forward_kernel, num_warps=4, launch_pdl=True)


@dataclass(frozen=True)
class ForwardConfig:
    """Consumers (64 query rows each) and slots for K and for V."""

    consumers: int
    stages: int


HEAD_DIM_128 = ForwardConfig(consumers=2, stages=2)
HEAD_DIM_64 = ForwardConfig(consumers=3, stages=3)
# Tiles of 192 queries reach too far beyond the diagonal, or the end, of a short sequence.
HEAD_DIM_64_SHORT = ForwardConfig(consumers=2, stages=4)
SHORT_CAUSAL = 2048  # queries
SHORT_FULL = 768


def choose_config(head_dim: int, num_queries: int, causal: bool) -> ForwardConfig:
    """The fastest of the shipped configurations, as measured on an H200."""
    if head_dim == 128:
        return HEAD_DIM_128
    return HEAD_DIM_64_SHORT if num_queries < (SHORT_CAUSAL if causal else SHORT_FULL) else HEAD_DIM_64


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k^T scale) v and the log-sum-exp of the scores (float32 (batch, heads, num_queries),
    natural).

    q: (batch, heads, num_queries, head_dim); k, v: (batch, key_heads, num_keys, head_dim). Whether the
    kernel can run is `unsupported_reason`'s to say; here it is taken for granted.
    """
    batch, heads, num_queries, head_dim = q.shape
    num_keys = k.shape[2]
    config = choose_config(head_dim, num_queries, causal)
    registers, consumer_registers = REGISTERS[config.consumers]
    num_tiles = triton.cdiv(num_queries, ROWS * config.consumers)
    units = batch * heads * ((num_tiles + 1) // 2 if causal else num_tiles)
    rows, keys = (1, 1, ROWS, head_dim), (1, 1, KEYS, head_dim)
    with selected(q.device):
        out = empty_in_order_of(q)
        lse = torch.empty((batch, heads, num_queries), device=q.device, dtype=torch.float32)
        _launch(
            (min(units, num_multiprocessors(q.device)), 1),
            q.dtype,
            (
                *(describe(q, rows), describe(k, keys), describe(v, keys), describe(out, rows), lse),
                *(num_queries, num_keys, heads, heads // k.shape[1], num_tiles, batch * heads),
                scale * math.log2(math.e),
            ),
            (head_dim, config.stages, causal, num_keys % KEYS != 0, config.consumers, consumer_registers),
            maxnreg=registers,
        )
    return out, lse
