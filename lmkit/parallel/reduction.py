"""Collectives that average: started without waiting, counted, waited for later."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from lmkit.parallel.process_group import Ranks
from lmkit.parallel.traffic import Traffic

# torch 2.13 renamed these two and warns about the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def wire_dtype_for(dtype: torch.dtype, option: str) -> torch.dtype:
    """In what dtype gradients of `dtype` travel: "bf16" halves fp32 gradients, others travel as they are."""
    return torch.bfloat16 if option == "bf16" and dtype == torch.float32 else dtype


@dataclass
class PendingMean:
    """A reduction under way; `wait` makes `results` the mean over the ranks.

    On GPUs waiting holds the current stream, not the host.
    """

    work: dist.Work
    results: list[torch.Tensor]
    divide_by: int = 1

    def wait(self) -> list[torch.Tensor]:
        self.work.wait()
        if self.divide_by != 1:
            torch._foreach_div_(self.results, self.divide_by)
        return self.results


class Averager:
    """Starts averaging collectives for one strategy and counts them."""

    def __init__(self, ranks: Ranks, traffic: Traffic) -> None:
        self._ranks = ranks
        self._traffic = traffic
        self._has_nccl = "nccl" in str(dist.get_backend_config())

    def all_reduce(self, tensors: list[torch.Tensor]) -> PendingMean:
        """Start averaging contiguous tensors of one dtype and device in place, all of them in one call.

        NCCL joins them in one kernel that works where they lie; gloo copies them together and apart again.
        """
        self._traffic.count_all_reduce(sum(tensor.nbytes for tensor in tensors), self._ranks.world_size)
        op, divide_by = self._mean_of(tensors[0])
        if len(tensors) == 1:
            work = dist.all_reduce(tensors[0], op=op, async_op=True)
        else:
            # Of torch.distributed's own functions one is deprecated and the other, a context manager, costs the
            # host as much as the launch does.
            options = dist.AllreduceCoalescedOptions()
            options.reduceOp, options.asyncOp = dist.ReduceOp(op), True
            assert dist.group.WORLD is not None
            work = dist.group.WORLD.allreduce_coalesced(tensors, options)
        return PendingMean(work, tensors, divide_by)

    def reduce_scatter(self, flat: torch.Tensor) -> PendingMean:
        """Start averaging `flat` (world_size * n,); the one result is this rank's part (n,), a view of `flat`."""
        self._traffic.count_scatter_or_gather(flat.nbytes, self._ranks.world_size)
        part = flat.chunk(self._ranks.world_size)[self._ranks.rank]
        op, divide_by = self._mean_of(flat)
        work = _reduce_scatter(part, flat, op=op, async_op=True)
        return PendingMean(work, [part], divide_by)

    def all_gather(self, flat: torch.Tensor) -> dist.Work:
        """Start filling `flat` (world_size * n,) with every rank's part; this rank's part is there already."""
        self._traffic.count_scatter_or_gather(flat.nbytes, self._ranks.world_size)
        part = flat.chunk(self._ranks.world_size)[self._ranks.rank]
        work: dist.Work = _all_gather(flat, part, async_op=True)
        return work

    def _mean_of(self, flat: torch.Tensor) -> tuple[dist.ReduceOp.RedOpType, int]:
        """(operation, divisor): gloo has no AVG, so there the sum is divided when it is waited for."""
        if self._has_nccl and flat.device.type == "cuda":
            return dist.ReduceOp.AVG, 1
        return dist.ReduceOp.SUM, self._ranks.world_size
