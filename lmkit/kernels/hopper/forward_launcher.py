"""Launches the forward kernel: configuration, descriptors, grid."""

import math
from dataclasses import dataclass

import torch
import triton

from lmkit.kernels.hopper.forward_kernel import forward_kernel
from lmkit.kernels.hopper.tensors import describe, empty_in_order_of

ROWS = 64  # query rows of a consumer
KEYS = 128
# Registers a thread at launch, and a consumer's after it has taken the producer's share, by the number of consumers
REGISTERS = {2: (168, 240), 3: (128, 160)}


@dataclass(frozen=True)
class ForwardConfig:
    """Consumers (64 query rows each), slots for K and for V, and the eighths of the exponentials done as polynomials."""

    consumers: int
    stages: int
    polynomial_eighths: int


CONFIGS = {
    (64, False): ForwardConfig(consumers=3, stages=2, polynomial_eighths=0),
    (64, True): ForwardConfig(consumers=2, stages=3, polynomial_eighths=2),
    (128, False): ForwardConfig(consumers=2, stages=2, polynomial_eighths=0),
    (128, True): ForwardConfig(consumers=2, stages=2, polynomial_eighths=0),
}


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k^T scale) v and the log-sum-exp of the scores (float32 (batch, heads, num_queries), natural).

    q: (batch, heads, num_queries, head_dim); k, v: (batch, key_heads, num_keys, head_dim). Whether the kernel can run is
    `unsupported_reason`'s to say; here it is taken for granted.
    """
    batch, heads, num_queries, head_dim = q.shape
    num_keys = k.shape[2]
    config = CONFIGS[head_dim, causal]
    out = empty_in_order_of(q)
    lse = torch.empty((batch, heads, num_queries), device=q.device, dtype=torch.float32)
    num_tiles = triton.cdiv(num_queries, ROWS * config.consumers)
    registers, consumer_registers = REGISTERS[config.consumers]
    units = batch * heads * ((num_tiles + 1) // 2 if causal else num_tiles)
    blocks = min(units, torch.cuda.get_device_properties(q.device).multi_processor_count)
    rows, keys = (1, 1, ROWS, head_dim), (1, 1, KEYS, head_dim)
    forward_kernel[(blocks,)](
        describe(q, rows),
        describe(k, keys),
        describe(v, keys),
        describe(out, rows),
        lse,
        num_queries,
        num_keys,
        heads,
        heads // k.shape[1],
        num_tiles,
        batch * heads,
        scale * math.log2(math.e),
        D=head_dim,
        STAGES=config.stages,
        CAUSAL=causal,
        TAIL=num_keys % KEYS != 0,
        POLYNOMIAL=config.polynomial_eighths,
        CONSUMERS=config.consumers,
        REGISTERS=consumer_registers,
        num_warps=4,
        maxnreg=registers,
    )
    return out, lse
