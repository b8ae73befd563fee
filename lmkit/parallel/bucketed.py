"""`bucketed`: gradients fill buckets in the order in which they become ready; a full bucket is reduced at once.

Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", without the buckets'
memory: the gradients of a bucket are averaged where they lie, by one grouped call of the backend, so there is no flat
tensor to allocate, to fill or to copy from. Only gradients that travel in another dtype are packed (and unpacked).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from lmkit.parallel.overlap import OverlapSync
from lmkit.parallel.reduction import wire_dtype_for
from lmkit.registry import STRATEGIES

MIB = 2**20
LAST_BUCKET_BYTES = 1 * MIB
"""The last bucket's reduction is what the backward pass cannot hide: only what comes at the very end is in it."""


@STRATEGIES.register(
    "bucketed", order=5, aliases=("flashddp", "Bucketed Overlapping DDP"), uses=("bucket_mb", "wire_dtype")
)
class BucketedSync(OverlapSync):
    """As `overlap`, with parameters of about `bucket_mb` per call. Heeds `bucket_mb` and `wire_dtype`."""

    def _plan_buckets(self, in_ready_order: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        return plan_buckets(in_ready_order, int(self.options.bucket_mb * MIB), self.options.wire_dtype)

    def _wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return wire_dtype_for(dtype, self.options.wire_dtype)


def plan_buckets(
    in_ready_order: Sequence[nn.Parameter], capacity: int, wire_dtype: str = "fp32"
) -> list[list[nn.Parameter]]:
    """`fill_buckets`, with the tail of the order (up to `LAST_BUCKET_BYTES`, or else its last parameter) apart."""
    tail = _tail_length(in_ready_order, wire_dtype)
    body, end = in_ready_order[: len(in_ready_order) - tail], in_ready_order[len(in_ready_order) - tail :]
    return [*fill_buckets(body, capacity, wire_dtype), *fill_buckets(end, capacity, wire_dtype)]


def fill_buckets(
    in_ready_order: Sequence[nn.Parameter], capacity: int, wire_dtype: str = "fp32"
) -> list[list[nn.Parameter]]:
    """Fill buckets until each has at least `capacity` bytes in `wire_dtype`; one device and dtype each.

    The parameter that reaches the capacity closes its bucket (as in PyTorch's reducer): many collectives cost
    the host more than slightly larger ones cost the link. Listed by when each bucket's last parameter is ready.
    """
    closed: list[list[nn.Parameter]] = []
    filling: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
    for parameter in in_ready_order:
        bucket = filling.setdefault((parameter.device, parameter.dtype), [])
        bucket.append(parameter)
        if sum(bytes_of(p, wire_dtype) for p in bucket) >= capacity:
            closed.append(filling.pop((parameter.device, parameter.dtype)))
    closed.extend(filling.values())
    ready_at = {parameter: position for position, parameter in enumerate(in_ready_order)}
    return sorted(closed, key=lambda bucket: ready_at[bucket[-1]])


def _tail_length(parameters: Sequence[nn.Parameter], wire_dtype: str) -> int:
    total = 0
    for length, parameter in enumerate(reversed(parameters)):
        total += bytes_of(parameter, wire_dtype)
        if total > LAST_BUCKET_BYTES:
            return max(1, length)
    return len(parameters)


def bytes_of(parameter: nn.Parameter, wire_dtype: str) -> int:
    """What its gradient takes on the wire."""
    return parameter.numel() * wire_dtype_for(parameter.dtype, wire_dtype).itemsize
