"""`overlap`: every gradient's all-reduce starts the moment it is ready, while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from lmkit.parallel.packing import ReducingBucket, gradients_of, pack_gradients
from lmkit.parallel.ready_queue import ReadyQueue
from lmkit.parallel.replicated import ReplicatedSync


class OverlapSync(ReplicatedSync):
    """One asynchronous all-reduce per parameter, from hooks (the buckets here hold one parameter each).

    The order in which gradients become ready is recorded in the first step; rank 0's order then holds on all
    ranks. Heeds no options.
    """

    def _install(self) -> None:
        self._flying: list[ReducingBucket] = []
        self._ready_order: list[int] | None = []  # None once the order is settled
        self._index_of = {parameter: index for index, parameter in enumerate(self.parameters)}
        self._handles: list[RemovableHandle] = []
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
        self._queue = ReadyQueue([len(bucket) for bucket in buckets], self._launch, self._forget)

    def _watch_every_gradient(self) -> None:
        self._watches_all = True
        bucket_of = {parameter: index for index, bucket in enumerate(self._buckets) for parameter in bucket}
        self._set_hooks({p: partial(self._on_gradient, index) for p, index in bucket_of.items()})

    def _watch_bucket_ends(self) -> None:
        """A hook per bucket instead of one per gradient: each costs the host microseconds.

        Only where a gradient that is there is a gradient that is complete: after `zero_grad(set_to_none=True)`,
        without accumulation, and in the gradients' own dtype (what is sent too early would not be noticed else).
        """
        self._watches_all = False
        self._set_hooks({bucket[-1]: self._on_bucket_end for bucket in self._buckets})

    def _set_hooks(self, hooks: dict[nn.Parameter, Callable[[nn.Parameter], None]]) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = [p.register_post_accumulate_grad_hook(hook) for p, hook in hooks.items()]

    # The hooks. Autograd records nothing inside a backward pass; a no_grad there would only cost time.

    def _on_gradient(self, bucket: int, parameter: nn.Parameter) -> None:
        if self._accumulating:
            return
        self._queue.begin()
        self._queue.mark(bucket)
        if self._ready_order is not None:
            self._ready_order.append(self._index_of[parameter])

    def _on_bucket_end(self, parameter: nn.Parameter) -> None:
        if self._queue.begin() and self._has_leftovers(parameter):
            self._watch_every_gradient()
        if not self._watches_all:
            self._queue.launch_while(self._is_complete)

    def _has_leftovers(self, first: nn.Parameter) -> bool:
        """Whether other buckets' ends have gradients when the pass's first one is ready: they are from before,
        this pass will add to them, and their presence says nothing."""
        return any(bucket[-1].grad is not None for bucket in self._buckets if bucket[-1] is not first)

    def _is_complete(self, index: int) -> bool:
        return all(parameter.grad is not None for parameter in self._buckets[index])

    def _launch(self, index: int) -> None:
        bucket = self._buckets[index]
        packed = pack_gradients(bucket, gradients_of(bucket), self._wire_dtype(bucket[0].dtype))
        self._flying.append(ReducingBucket(packed, self._averager.all_reduce(packed.flat)))

    def no_sync(self) -> AbstractContextManager[None]:
        if self.ranks.world_size > 1 and not self._watches_all:
            self._watch_every_gradient()
        return super().no_sync()

    def _without_gradient(self) -> list[int]:
        left = self._buckets[self._queue.launched :]
        return [self._index_of[p] for bucket in left for p in bucket if p.grad is None]

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
        if self._accumulated or any(self._wire_dtype(p.dtype) != p.dtype for p in self.parameters):
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
