"""`overlap`: every gradient's all-reduce starts the moment it is ready, while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from lmkit.optim.clipping import gradient_norm
from lmkit.parallel.gradient_watch import GradientWatch, order_of_first_rank
from lmkit.parallel.late_step import LateStep
from lmkit.parallel.packing import ReducingBucket, gradients_of, pack_gradients
from lmkit.parallel.process_group import Ranks
from lmkit.parallel.replicated import ReplicatedSync, present_gradients
from lmkit.parallel.strategies import MakeOptimizer, SyncOptions
from lmkit.registry import STRATEGIES

LATE_BYTES = 32 * 2**20
"""A last bucket from this size on may arrive late (NVLink moves as much in 0.1 ms)."""


@STRATEGIES.register("overlap", order=4, aliases=("individual",))
class OverlapSync(ReplicatedSync):
    """One asynchronous all-reduce per parameter, from hooks (the buckets here hold one parameter each).

    The order in which gradients become ready is recorded in the first step; rank 0's order then holds on all
    ranks. Heeds no options.
    """

    _watch: GradientWatch

    def __init__(self, ranks: Ranks, options: SyncOptions) -> None:
        super().__init__(ranks, options)
        self._flying: list[ReducingBucket] = []

    def _install(self) -> None:
        self._order_is_settled = False
        self._index_of = {parameter: index for index, parameter in enumerate(self.parameters)}
        self._unused: list[int] = []  # this rank has only zeros for them
        # Until the first backward has shown the true order: the last layers' gradients come first.
        self._use_buckets(self._plan_buckets(self.parameters[::-1]))

    def _plan_buckets(self, in_ready_order: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Which parameters travel together, in the order of launching."""
        return [[parameter] for parameter in in_ready_order]

    def _wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def _use_buckets(self, buckets: list[list[nn.Parameter]]) -> None:
        self._buckets = buckets
        self._last_bytes = sum(parameter.nbytes for parameter in buckets[-1]) if buckets else 0
        self._watch = GradientWatch(buckets, self._launch, self._forget, self._is_paused)

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

    def _without_gradient(self) -> list[int]:
        return [self._index_of[parameter] for parameter in self._watch.without_gradient()]

    def _reduce(self, unused: Sequence[int], *, wait: bool) -> Sequence[int]:
        self._unused = list(unused)
        self._watch.launch_rest()
        self._unused = []
        # The last is not waited for if it is long: a step in two parts costs the host some 0.1 ms.
        everything = wait or unused or not self._order_is_settled or self._last_bytes < LATE_BYTES
        self._wait_for_flying(leave=0 if everything else 1)
        if not self._order_is_settled:
            self._settle_order()
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

    def _settle_order(self) -> None:
        """Plan buckets anew, in the order of rank 0's gradients; what got none there goes last."""
        in_ready_order = order_of_first_rank(self._watch.order, self.parameters[::-1], self.ranks)
        self._watch.close()
        self._use_buckets(self._plan_buckets(in_ready_order))
        if not self._accumulated:
            self._watch.watch_ends(in_ready_order)
        self._order_is_settled = True

    def reset(self) -> None:
        if self.ranks.world_size > 1:
            self._forget()
            self._watch.reset()

    def _forget(self) -> None:
        for bucket in self._flying:
            bucket.abandon()
        self._flying.clear()
