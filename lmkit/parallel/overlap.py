"""`overlap`: every gradient's all-reduce starts the moment it is ready, while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from lmkit.parallel.packing import ReducingBucket, pack_gradients
from lmkit.parallel.ready_queue import ReadyQueue
from lmkit.parallel.replicated import ReplicatedSync


class OverlapSync(ReplicatedSync):
    """One asynchronous all-reduce per parameter, from hooks (the buckets here hold one parameter each).

    The order in which gradients become ready is recorded in the first step; rank 0's order then holds on all
    ranks. Heeds `max_ctas`.
    """

    def _install(self) -> None:
        self._flying: list[ReducingBucket] = []
        self._ready_order: list[int] | None = []  # None once the order is settled
        self._index_of = {parameter: index for index, parameter in enumerate(self.parameters)}
        # Until the first backward has shown the true order: the last layers' gradients come first.
        self._use_buckets(self._plan_buckets(self.parameters[::-1]))
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def _plan_buckets(self, in_ready_order: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Which parameters travel together, in the order of launching."""
        return [[parameter] for parameter in in_ready_order]

    def _wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def _use_buckets(self, buckets: list[list[nn.Parameter]]) -> None:
        self._buckets = buckets
        self._bucket_of = {parameter: index for index, bucket in enumerate(buckets) for parameter in bucket}
        self._queue = ReadyQueue([len(bucket) for bucket in buckets], self._launch, self._forget)

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        # Autograd records nothing inside a backward pass; a no_grad here would cost as much as the rest.
        if self._accumulating:
            return
        self._queue.mark(self._bucket_of[parameter])
        if self._ready_order is not None:
            self._ready_order.append(self._index_of[parameter])

    def _launch(self, index: int) -> None:
        bucket = self._buckets[index]
        packed = pack_gradients(bucket, self._wire_dtype(bucket[0].dtype))
        self._flying.append(ReducingBucket(packed, self._averager.all_reduce(packed.flat)))

    def _reduce(self) -> None:
        self._queue.launch_rest()
        for bucket in self._flying:
            bucket.wait()
        self._flying.clear()
        if self._ready_order is not None:
            self._settle_order(self._ready_order)
            self._ready_order = None

    def _settle_order(self, mine: list[int]) -> None:
        """Take rank 0's order for all ranks; what got no gradient there goes last."""
        seen = set(mine)
        mine = mine + [index for index in reversed(range(len(self.parameters))) if index not in seen]
        order = torch.tensor(mine, device=self.ranks.device)
        dist.broadcast(order, src=0)
        self._use_buckets(self._plan_buckets([self.parameters[index] for index in order.tolist()]))

    def reset(self) -> None:
        if self.ranks.world_size > 1:
            self._forget()
            self._queue.reset()

    def _forget(self) -> None:
        for bucket in self._flying:
            bucket.pending.work.wait()
        self._flying.clear()
        if self._ready_order is not None:
            self._ready_order = []
