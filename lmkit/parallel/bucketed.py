"""`bucketed`: fill buckets in the order in which gradients become ready, and all-reduce a bucket when it is full.

Reductions overlap the backward pass. `lmkit.parallel.buckets` has the mechanism; this file decides what is launched
and what waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from lmkit.core.clipping import gradient_norm
from lmkit.parallel.buckets import MIB, BucketHooks, ReducingBucket, order_of_first_rank, plan_buckets
from lmkit.parallel.collectives import reduce_dtype_for
from lmkit.parallel.protocol import MakeOptimizer, Strategy, present_gradients
from lmkit.parallel.ranks import Ranks
from lmkit.recipe.tables import ParallelConfig
from lmkit.registry import STRATEGIES

LATE_BYTES = 32 * MIB
"""Smallest last bucket, in bytes, for which the optimizer's step is split (`LateStep`). The reduction of a smaller
bucket takes less time than a second pass of the optimizer."""


@STRATEGIES.register(
    "bucketed", order=5, aliases=("flashddp", "Bucketed Overlapping DDP"), uses=("bucket_mb", "reduce_dtype")
)
class BucketedSync(Strategy):
    """Average about `bucket_mb` of gradients per call, in `reduce_dtype`.

    The first backward pass shows the order in which gradients become ready. Rank 0's order then holds on all ranks.
    In the first step nothing is launched before: sums over more than two ranks depend on the buckets, and a resumed
    run has to make the steps of a run that was not interrupted.
    """

    _hooks: BucketHooks

    def __init__(self, ranks: Ranks, config: ParallelConfig) -> None:
        super().__init__(ranks, config)
        self._flying: list[ReducingBucket] = []
        self._unused: list[int] = []  # indices of the parameters that this rank did not use
        self._order_is_settled = False

    def _install(self) -> None:
        self._index_of = {parameter: index for index, parameter in enumerate(self.parameters)}
        self._use_buckets([self.parameters], launch=lambda index: None)

    def _plan(self, in_ready_order: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Return the buckets in the order in which they are launched."""
        return plan_buckets(in_ready_order, int(self.config.bucket_mb * MIB), self.config.reduce_dtype)

    def _use_buckets(self, buckets: list[list[nn.Parameter]], launch: Callable[[int], None]) -> None:
        self._buckets = buckets
        self._last_bytes = sum(parameter.nbytes for parameter in buckets[-1]) if buckets else 0
        self._hooks = BucketHooks(buckets, launch, self._forget, lambda: self._is_accumulating)

    def _launch(self, index: int) -> None:
        bucket = self._buckets[index]
        reduce_dtype = reduce_dtype_for(bucket[0].dtype, self.config.reduce_dtype)
        extra = []
        if index == len(self._buckets) - 1:
            # One flag for each parameter that this rank used. Sending them with the last bucket saves a call.
            self._used = torch.ones(len(self.parameters), dtype=reduce_dtype, device=bucket[0].device)
            if self._unused:
                self._used[self._unused] = 0
            extra = [self._used]
        self._flying.append(ReducingBucket(bucket, self._averager, reduce_dtype=reduce_dtype, extra=extra))

    def _without_gradient(self) -> list[int]:
        return [self._index_of[parameter] for parameter in self._hooks.without_gradient()]

    def _reduce(self, unused: Sequence[int], *, wait: bool) -> Sequence[int]:
        is_first = not self._order_is_settled
        if is_first:
            self._settle_order()
        self._unused = list(unused)
        self._hooks.launch_rest()
        self._unused = []
        everything = wait or unused or is_first or self._last_bytes < LATE_BYTES
        self._wait_for_flying(leave=0 if everything else 1)
        if not unused:
            return []
        share = self._used.tolist()  # share of the ranks that used each parameter; makes the host wait
        return [index for index in unused if share[index] == 0]

    def _settle_order(self) -> None:
        """Plan the buckets in the order of rank 0's gradients; parameters without one there come last."""
        in_ready_order = order_of_first_rank(self._hooks.order, self.parameters[::-1], self.ranks)
        self._hooks.close()
        self._use_buckets(self._plan(in_ready_order), self._launch)
        if not self._ever_accumulated:
            self._hooks.watch_ends(in_ready_order)
        self._order_is_settled = True

    # `finish(wait=False)` leaves the last bucket in flight. Clipping and the optimizer wait before they read it.

    def build_optimizer(self, make: MakeOptimizer, groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
        optimizer = super().build_optimizer(make, groups)
        if self.ranks.world_size > 1:
            LateStep(optimizer, self._late_parameters, self._wait_for_flying)
        return optimizer

    def _gradient_norm(self) -> torch.Tensor:
        late = set(self._late_parameters())
        # Compute the norm of the other gradients while the late ones are reduced.
        norm = gradient_norm(present_gradients(p for p in self.parameters if p not in late))
        if not late:
            return norm
        self._wait_for_flying()
        return torch.linalg.vector_norm(torch.stack((norm, gradient_norm(present_gradients(late)))))

    def _late_parameters(self) -> list[nn.Parameter]:
        return self._buckets[-1] if self._flying else []

    def _wait_for_flying(self, leave: int = 0) -> None:
        while len(self._flying) > leave:
            self._flying.pop(0).wait()

    def reset(self) -> None:
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize(self.ranks.device)
            self._flying.clear()  # events of a capture that failed cannot be waited for
        self._forget()
        if self._hooks is not None:  # more than one rank
            self._hooks.reset()

    def _forget(self) -> None:
        for bucket in self._flying:
            bucket.abandon()
        self._flying.clear()


class LateStep:
    """Split an optimizer's step: update the parameters whose gradients have arrived, wait, then update the rest.

    In many models the embedding's gradient is the largest and is ready last. Its reduction cannot overlap the
    backward pass, which has ended, but it overlaps the update of all other parameters. The optimizer must skip
    parameters without a gradient and keep its state per parameter, as PyTorch's optimizers do.

    Args:
        late: returns the parameters whose gradients are still being reduced.
        wait: waits for these gradients.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        late: Callable[[], Iterable[nn.Parameter]],
        wait: Callable[[], None],
    ) -> None:
        self._late = late
        self._wait = wait
        self._withheld: dict[nn.Parameter, torch.Tensor | None] = {}
        self._is_second = False
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_second:
            return
        late = {parameter: parameter.grad for parameter in self._late()}
        if len(args) > 1 or kwargs:  # a closure computes the gradients anew
            self._wait()
            return
        self._withheld = late
        for parameter in late:
            parameter.grad = None

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_second or not self._withheld:
            return
        late, self._withheld = self._withheld, {}
        for parameter, gradient in late.items():
            parameter.grad = gradient
        self._wait()
        others = {p: p.grad for group in optimizer.param_groups for p in group["params"] if p not in late}
        for parameter in others:
            parameter.grad = None
        self._is_second = True
        try:
            optimizer.step()
        finally:
            self._is_second = False
            for parameter, gradient in others.items():
                parameter.grad = gradient
