"""Averaging collectives, a count of what they move, and decisions that all ranks take together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _unflatten_dense_tensors

from lmkit.core.buckets import PendingMean, Work, gradients_of
from lmkit.errors import LmkitError
from lmkit.parallel.ranks import Ranks

T = TypeVar("T")

# torch 2.13 renamed these two and warns about the old names.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass
class Traffic:
    """Count what this rank handed to collectives since the last `reset`.

    Attributes:
        calls: collectives started. A tensor read from the memory of other ranks counts as one.
        payload_bytes: size of the tensors that were reduced or gathered.
        link_bytes: bytes that a ring sends per rank, averaged: 2 (W-1)/W of an all-reduce's bytes, (W-1)/W of a
            reduce-scatter's, all-gather's or broadcast's (Thakur, Rabenseifner and Gropp 2005, "Optimization of
            Collective Communication Operations").
    """

    calls: int = 0
    payload_bytes: int = 0
    link_bytes: float = 0.0

    def count(self, num_bytes: int, world_size: int, *, passes: int = 1, calls: int = 1) -> None:
        """Count collectives of `num_bytes` of all ranks' parts; an all-reduce makes two passes over the ring."""
        self.calls += calls
        self.payload_bytes += num_bytes
        self.link_bytes += passes * (world_size - 1) / world_size * num_bytes

    def reset(self) -> None:
        self.calls, self.payload_bytes, self.link_bytes = 0, 0, 0.0


def reduce_dtype_for(dtype: torch.dtype, option: str) -> torch.dtype:
    """Return the dtype in which gradients of `dtype` are reduced; the option "bf16" changes only fp32."""
    return torch.bfloat16 if option == "bf16" and dtype == torch.float32 else dtype


class Averager:
    """Start averaging collectives in a group (None: the default group) and count them in `traffic`. `all_reduce` of
    several tensors always uses the default group."""

    def __init__(self, ranks: Ranks, traffic: Traffic, group: dist.ProcessGroup | None = None) -> None:
        self.ranks = ranks
        self.traffic = traffic
        self.group = group
        self._has_nccl = "nccl" in str(dist.get_backend_config())

    def all_reduce(self, tensors: list[torch.Tensor]) -> PendingMean:
        """Start averaging contiguous tensors of one device in place, in one call of the backend for each dtype; gloo
        has none for CUDA tensors, so it reduces them one by one."""
        if any(tensor.dtype != tensors[0].dtype for tensor in tensors):
            dtypes = dict.fromkeys(tensor.dtype for tensor in tensors)
            parts = [self.all_reduce([x for x in tensors if x.dtype == dtype]) for dtype in dtypes]
            return PendingMean([work for part in parts for work in part.works], tensors, parts[0].divide_by)
        one_by_one = len(tensors) == 1 or (tensors[0].device.type == "cuda" and not self._has_nccl)
        num_bytes, calls = sum(tensor.nbytes for tensor in tensors), len(tensors) if one_by_one else 1
        self.traffic.count(num_bytes, self.ranks.world_size, passes=2, calls=calls)
        op, divide_by = self._mean_of(tensors[0])
        if one_by_one:
            works = [dist.all_reduce(tensor, op=op, group=self.group, async_op=True) for tensor in tensors]
            return PendingMean(works, tensors, divide_by)
        # Call the backend directly: torch.distributed has only a deprecated function for this, and a context manager
        # that takes the host as long as the launch itself.
        options = dist.AllreduceCoalescedOptions()
        options.reduceOp, options.asyncOp = dist.ReduceOp(op), True
        assert dist.group.WORLD is not None
        return PendingMean([dist.group.WORLD.allreduce_coalesced(tensors, options)], tensors, divide_by)

    def reduce_scatter(self, flat: torch.Tensor) -> PendingMean:
        """Start averaging `flat` (world_size * n,); the result is this rank's part (n,), a view of `flat`."""
        part = self._count_and_take_part(flat)
        op, divide_by = self._mean_of(flat)
        works = [_reduce_scatter(part, flat, op=op, group=self.group, async_op=True)]
        return PendingMean(works, [part], divide_by)

    def all_gather(self, flat: torch.Tensor) -> Work:
        """Start filling `flat` (world_size * n,) with all ranks' parts; it already holds this rank's part."""
        work: Work = _all_gather(flat, self._count_and_take_part(flat), group=self.group, async_op=True)
        return work

    def _count_and_take_part(self, flat: torch.Tensor) -> torch.Tensor:
        self.traffic.count(flat.nbytes, self.ranks.world_size)
        return self.ranks.own_part(flat)

    def _mean_of(self, flat: torch.Tensor) -> tuple[dist.ReduceOp.RedOpType, int]:
        """Return (operation, divisor). gloo has no AVG, so `PendingMean.wait` divides its sum."""
        if self._has_nccl and flat.device.type == "cuda":
            return dist.ReduceOp.AVG, 1
        return dist.ReduceOp.SUM, self.ranks.world_size


def average_bucket(
    parameters: Sequence[nn.Parameter],
    averager: Averager,
    reduce_dtype: torch.dtype,
    *,
    pack: bool = False,
    extra: Sequence[torch.Tensor] = (),
) -> PendingMean:
    """Start averaging the gradients of `parameters` (one device and dtype, none of them None) with one all-reduce.

    Gradients that are reduced in another dtype are packed into a flat tensor and copied back.

    Args:
        pack: pack in any case. If the dtype stays, `parameter.grad` becomes a view of the flat tensor.
        extra: further tensors of `reduce_dtype` to average in the same call.
    """
    gradients = gradients_of(parameters)
    first = gradients[0]
    if not pack and reduce_dtype == first.dtype:
        return averager.all_reduce([*gradients, *extra])
    flat = torch.empty(sum(g.numel() for g in gradients), dtype=reduce_dtype, device=first.device)
    views = list(_unflatten_dense_tensors(flat, gradients))
    torch._foreach_copy_(views, gradients)
    pending = averager.all_reduce([flat, *extra])
    if reduce_dtype != first.dtype:
        pending.copies = gradients, views
    else:
        for parameter, view in zip(parameters, views, strict=True):
            parameter.grad = view
    return pending


def unused_everywhere(unused: Sequence[int], count: int, ranks: Ranks, traffic: Traffic) -> list[int]:
    """Return which of this rank's `unused` parameters, indices below `count`, got a gradient on no rank. Collective.

    Only a rank with unused parameters waits for the answer (on GPUs: the host does).
    """
    if ranks.world_size == 1:
        return list(unused)
    used = torch.ones(count, dtype=torch.int32, device=ranks.device)
    if unused:
        used[list(unused)] = 0
    traffic.count(used.nbytes, ranks.world_size, passes=2)
    work = dist.all_reduce(used, op=dist.ReduceOp.MAX, async_op=True)
    if unused or is_captured(used.device):
        work.wait()  # in a graph, nothing else would keep the tensor's memory until the collective has ended
    if not unused:
        return []
    anywhere = used.tolist()
    return [index for index in unused if not anywhere[index]]


def is_captured(device: torch.device) -> bool:
    """Return whether a CUDA graph captures what is launched on the device's current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def agree(ranks: Ranks, *, stop: bool = False) -> bool:
    """Return whether any rank wants to stop. Collective."""
    return on_any_rank(ranks, stop)[0]


def on_any_rank(ranks: Ranks, *facts: bool) -> tuple[bool, ...]:
    """Return, for each fact, whether it holds on at least one rank. Collective by gloo: NCCL would wait for
    kernels."""
    if ranks.world_size == 1:
        return facts
    return tuple(map(bool, largest_of_ranks(facts, ranks)))


def sum_over_ranks(numbers: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Replace each element by its sum over the ranks; return all. Collective; with NCCL the host does not wait."""
    if ranks.world_size > 1:
        dist.all_reduce(numbers)
    return numbers


def norm_over_ranks(norm: torch.Tensor, averager: Averager | None) -> torch.Tensor:
    """Return the joint norm of the shards of all ranks of a group; this rank's have the norm `norm`. Collective.

    Args:
        averager: of the group; None if this rank is alone.
    """
    square = norm.square()
    if averager is not None and averager.ranks.world_size > 1:
        averager.traffic.count(square.nbytes, averager.ranks.world_size, passes=2)
        dist.all_reduce(square, group=averager.group)
    return square.sqrt()


def largest_on_any_rank(numbers: torch.Tensor, ranks: Ranks) -> None:
    """Replace each element by its maximum over the ranks. Collective; with NCCL the host does not wait."""
    if ranks.world_size > 1:
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)


def largest_of_ranks(numbers: Sequence[float], ranks: Ranks) -> list[float]:
    """Return the largest of each number on any rank. Collective."""
    largest = torch.tensor(numbers, dtype=torch.float64)
    largest_on_any_rank(largest, ranks)
    found: list[float] = largest.tolist()
    return found


def decided_by_first(ranks: Ranks, decide: Callable[[], T]) -> T:
    """Call `decide` on rank 0 only; return its answer, or raise its LmkitError, on every rank. Collective."""
    outcome: list[T | LmkitError | None] = [None]
    if ranks.is_first:
        try:
            outcome = [decide()]
        except LmkitError as error:
            outcome = [error]
    if ranks.world_size > 1:
        dist.broadcast_object_list(outcome, src=0, device=torch.device("cpu"))
    (answer,) = outcome
    if isinstance(answer, LmkitError):
        raise answer
    return cast(T, answer)
