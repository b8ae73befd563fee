"""`overlap`: every gradient's all-reduce starts the moment it is ready, while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from lmkit.optim.clipping import gradient_norm
from lmkit.parallel.gradient_hooks import on_gradient
from lmkit.parallel.late_step import LateStep
from lmkit.parallel.packing import ReducingBucket, gradients_of, pack_gradients
from lmkit.parallel.process_group import Ranks
from lmkit.parallel.ready_queue import ReadyQueue
from lmkit.parallel.replicated import ReplicatedSync, present_gradients
from lmkit.parallel.strategies import MakeOptimizer, SyncOptions

LATE_BYTES = 32 * 2**20
"""A last bucket from this size on may arrive late (NVLink moves as much in 0.1 ms)."""


class OverlapSync(ReplicatedSync):
    """One asynchronous all-reduce per parameter, from hooks (the buckets here hold one parameter each).

    The order in which gradients become ready is recorded in the first step; rank 0's order then holds on all
    ranks. Heeds no options.
    """

    def __init__(self, ranks: Ranks, options: SyncOptions) -> None:
        super().__init__(ranks, options)
        self._flying: list[ReducingBucket] = []

    def _install(self) -> None:
        self._ready_order: list[int] | None = []  # None once the order is settled
        self._index_of = {parameter: index for index, parameter in enumerate(self.parameters)}
        self._handles: list[RemovableHandle] = []
        self._unused: list[int] = []  # this rank has only zeros for them
        # Until the first backward has shown the true order: the last layers' gradients come first.
        self._use_buckets(self._plan_buckets(self.parameters[::-1]))
        self._watch_every_gradient()

    def _plan_buckets(self, in_ready_order: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Which parameters travel together, in the order of launching."""
        return [[parameter] for parameter in in_ready_order]

    def _wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def _use_buckets(self, buckets: list[list[nn.Parameter]]) -> None:
        self._buckets = buckets
        self._last_bytes = sum(parameter.nbytes for parameter in buckets[-1]) if buckets else 0
        self._queue = ReadyQueue([len(bucket) for bucket in buckets], self._launch, self._forget)

    def _watch_every_gradient(self) -> None:
        self._watches_all = True
        self._remove_hooks()
        self._handles = [
            on_gradient(parameter, self._on_gradient, index)
            for index, bucket in enumerate(self._buckets)
            for parameter in bucket
        ]

    def _watch_bucket_ends(self) -> None:
        """A hook per bucket (and one where the pass begins) instead of one per gradient: each costs the host
        microseconds. Only where a gradient that is there is one that is complete: without accumulation, after
        `zero_grad(set_to_none=True)`.
        """
        self._watches_all = False
        watched = [self._buckets[0][0], *(bucket[-1] for bucket in self._buckets)] if self._buckets else []
        self._remove_hooks()
        self._handles = [on_gradient(parameter, self._on_watched) for parameter in dict.fromkeys(watched)]

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()

    # The hooks. Autograd records nothing inside a backward pass; a no_grad there would only cost time.

    def _on_gradient(self, bucket: int, parameter: nn.Parameter) -> None:
        if self._accumulating:
            return
        self._queue.begin()
        self._queue.mark(bucket)
        if self._ready_order is not None:
            self._ready_order.append(self._index_of[parameter])

    def _on_watched(self, parameter: nn.Parameter) -> None:
        if self._queue.begin() and not self._is_fresh_start(parameter):
            self._watch_every_gradient()
        if not self._watches_all:
            self._queue.launch_while(self._is_complete)

    def _is_fresh_start(self, first: nn.Parameter) -> bool:
        """Whether a pass begins as the recorded one did, with no gradient but the first: others would be from
        before, this pass would add to them, and their presence would say nothing."""
        return first is self._buckets[0][0] and all(p is first or p.grad is None for p in self.parameters)

    def _is_complete(self, index: int) -> bool:
        return all(parameter.grad is not None for parameter in self._buckets[index])

    def _launch(self, index: int) -> None:
        bucket = self._buckets[index]
        gradients = gradients_of(bucket)
        wire_dtype = self._wire_dtype(bucket[0].dtype)
        packed = None if wire_dtype == bucket[0].dtype else pack_gradients(bucket, gradients, wire_dtype)
        tensors = gradients if packed is None else [packed.flat]
        if index == len(self._buckets) - 1:
            # Which parameters this rank used: a call of its own would cost more than a few bytes on the last one.
            self._used = tensors[0].new_ones(len(self.parameters))
            if self._unused:
                self._used[self._unused] = 0
            tensors = [*tensors, self._used]
        self._flying.append(ReducingBucket(self._averager.all_reduce(tensors), packed))

    def no_sync(self) -> AbstractContextManager[None]:
        if self.ranks.world_size > 1 and not self._watches_all:
            self._watch_every_gradient()
        return super().no_sync()

    def _without_gradient(self) -> list[int]:
        left = self._buckets[self._queue.launched :]
        return [self._index_of[p] for bucket in left for p in bucket if p.grad is None]

    def _reduce(self, unused: Sequence[int], *, wait: bool) -> Sequence[int]:
        self._unused = list(unused)
        self._queue.launch_rest()
        self._unused = []
        # The last is not waited for if it is long: a step in two parts costs the host some 0.1 ms.
        everything = wait or unused or self._ready_order is not None or self._last_bytes < LATE_BYTES
        self._wait_for_flying(leave=0 if everything else 1)
        if self._ready_order is not None:
            self._settle_order(self._ready_order)
            self._ready_order = None
        if not unused:
            return []
        share = self._used.tolist()  # of the ranks; only a rank with unused parameters waits for it
        return [index for index in unused if share[index] == 0]

    def _wait_for_flying(self, leave: int = 0) -> None:
        while len(self._flying) > leave:
            self._flying.pop(0).wait()

    def _late_parameters(self) -> list[nn.Parameter]:
        return self._buckets[-1] if self._flying else []

    def build_optimizer(self, make: MakeOptimizer, groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
        optimizer = super().build_optimizer(make, groups)
        if self.ranks.world_size > 1:
            LateStep(optimizer, self._late_parameters, self._wait_for_flying)
        return optimizer

    def _gradient_norm(self) -> torch.Tensor:
        late = set(self._late_parameters())
        # While the late ones travel.
        norm = gradient_norm(present_gradients(p for p in self.parameters if p not in late))
        if not late:
            return norm
        self._wait_for_flying()
        return torch.linalg.vector_norm(torch.stack((norm, gradient_norm(present_gradients(late)))))

    def _settle_order(self, mine: list[int]) -> None:
        """Take rank 0's order for all ranks; what got no gradient there goes last."""
        seen = set(mine)
        mine = mine + [index for index in reversed(range(len(self.parameters))) if index not in seen]
        order = torch.tensor(mine, device=self.ranks.device)
        dist.broadcast(order, src=0)
        self._use_buckets(self._plan_buckets([self.parameters[index] for index in order.tolist()]))
        if self._accumulated:
            self._watch_every_gradient()
        else:
            self._watch_bucket_ends()

    def reset(self) -> None:
        if self.ranks.world_size > 1:
            self._forget()
            self._queue.reset()

    def _forget(self) -> None:
        for bucket in self._flying:
            bucket.abandon()
        self._flying.clear()
        if self._ready_order is not None:
            self._ready_order = []
