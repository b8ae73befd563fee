"""Strategies whose ranks hold the whole model: `naive`, `flat`; `overlap` and `bucketed`, which all-reduce
gradients inside the backward pass, one by one or a bucket at a time.

`lmkit.core.buckets` has the mechanism; this file decides how large buckets are, and what waits for the last one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from lmkit.core.buckets import MIB, fill_buckets
from lmkit.core.step import clip_for, gradient_norm
from lmkit.parallel.buckets import WatchedBuckets
from lmkit.parallel.collectives import Averager, average_bucket, reduce_dtype_for, unused_everywhere
from lmkit.parallel.strategy import MakeOptimizer, Strategy, present_gradients
from lmkit.registry import STRATEGIES

LAST_BUCKET_BYTES = 1 * MIB
"""Size of the last bucket. No backward pass is left to overlap its reduction, so it is kept small."""
LATE_BYTES = 32 * MIB
"""Smallest last bucket for which the optimizer's step is split: a smaller one is reduced in less time than a second
pass of the optimizer takes."""


class AveragedBuckets(WatchedBuckets):
    """Buckets that are averaged in `reduce_dtype`, with one flag for each parameter that this rank used.

    Attributes:
        unused: indices of the parameters that this rank did not use.
        used: after `wait`, the share of the ranks that used each parameter.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], capacity: int, averager: Averager, reduce_dtype: str
    ) -> None:
        super().__init__(parameters, capacity)
        self.unused: Sequence[int] = ()
        self._averager = averager
        self._reduce_dtype = reduce_dtype

    def plan(self, in_ready_order: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Fill buckets; the last `LAST_BUCKET_BYTES` (at least one parameter) get their own."""

        def bytes_of(parameter: nn.Parameter) -> int:
            return parameter.numel() * reduce_dtype_for(parameter.dtype, self._reduce_dtype).itemsize

        cut = max(0, len(in_ready_order) - 1)
        while cut > 0 and sum(map(bytes_of, in_ready_order[cut - 1 :])) <= LAST_BUCKET_BYTES:
            cut -= 1
        parts = in_ready_order[:cut], in_ready_order[cut:]
        return [bucket for part in parts for bucket in fill_buckets(part, self.capacity, bytes_of)]

    def launch(self, index: int) -> None:
        bucket, extra = self.buckets[index], []
        reduce_dtype = reduce_dtype_for(bucket[0].dtype, self._reduce_dtype)
        if index == len(self.buckets) - 1:  # sending the flags with the last bucket saves a call
            self.used = torch.ones(len(self.parameters), dtype=reduce_dtype, device=bucket[0].device)
            if self.unused:
                self.used[self.unused] = 0
            extra = [self.used]
        self.pending.append(average_bucket(bucket, self._averager, reduce_dtype, extra=extra))


@STRATEGIES.register(
    "bucketed", order=5, aliases=("flashddp", "Bucketed Overlapping DDP"), uses=("bucket_mb", "reduce_dtype")
)
class BucketedSync(Strategy):
    """Average about `bucket_mb` of gradients per call, in `reduce_dtype`, when they are ready.

    In the first step nothing is launched before `finish`: sums over more than two ranks depend on the buckets, and a
    resumed run has to make the steps of a run that was not interrupted.
    """

    buckets: AveragedBuckets
    one_by_one = False
    """Whether every parameter has a bucket of its own."""

    def _install(self) -> None:
        self._index_of = {parameter: index for index, parameter in enumerate(self.parameters)}
        capacity = 0 if self.one_by_one else int(self.config.bucket_mb * MIB)
        self.buckets = AveragedBuckets(self.parameters, capacity, self._averager, self.config.reduce_dtype)

    def _without_gradient(self) -> list[int]:
        return [self._index_of[parameter] for parameter in self.buckets.without_gradient()]

    def _reduce(self, unused: Sequence[int], *, wait: bool) -> Sequence[int]:
        hooks = self.buckets
        everything = wait or unused or hooks.in_ready_order is None
        hooks.unused = unused
        hooks.launch_rest()
        hooks.unused = ()
        everything = everything or sum(p.nbytes for bucket in hooks.buckets[-1:] for p in bucket) < LATE_BYTES
        hooks.wait(leave=0 if everything else 1)
        if not unused:
            return []
        share = hooks.used.tolist()  # makes the host wait
        return [index for index in unused if share[index] == 0]

    # `finish(wait=False)` leaves the last bucket in flight. Clipping and the optimizer wait before they read it.

    def build_optimizer(self, make: MakeOptimizer, groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
        optimizer = super().build_optimizer(make, groups)
        if self.ranks.world_size > 1:
            split_step(optimizer, self._late_parameters, self.buckets.wait)
        return optimizer

    @torch.no_grad()
    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        late = set(self._late_parameters())
        if not late:
            return super().clip_gradients(max_norm)
        # Compute the norm of the other gradients while the late ones are reduced.
        norm = gradient_norm(present_gradients(p for p in self.parameters if p not in late))
        self.buckets.wait()
        norm = torch.linalg.vector_norm(torch.stack((norm, gradient_norm(present_gradients(late)))))
        clip_for(self._optimizer, present_gradients(self.parameters), norm, max_norm)
        return norm

    def _late_parameters(self) -> list[nn.Parameter]:
        return self.buckets.buckets[-1] if self.buckets is not None and self.buckets.pending else []

    def reset(self) -> None:
        if self.buckets is None:  # one rank
            return
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize(self.ranks.device)
            self.buckets.pending.clear()  # events of a capture that failed cannot be waited for
        self.buckets.reset()


@STRATEGIES.register("overlap", order=4, aliases=("individual",), uses=("reduce_dtype",))
class OverlapSync(BucketedSync):
    """`bucketed` with one parameter per bucket."""

    one_by_one = True


def split_step(
    optimizer: torch.optim.Optimizer, late: Callable[[], Iterable[nn.Parameter]], wait: Callable[[], None]
) -> None:
    """Make each step update the parameters whose gradients have arrived, wait, then update the rest.

    The embedding's gradient is often the largest and ready last. Its reduction overlaps the update of all other
    parameters. The optimizer must skip parameters without a gradient and keep its state per parameter.

    Args:
        late: returns the parameters whose gradients are still being reduced; `wait` waits for them.
    """
    withheld: dict[nn.Parameter, torch.Tensor | None] = {}

    def before(*_: Any) -> None:
        withheld.clear()
        withheld.update((parameter, parameter.grad) for parameter in late())
        for parameter in withheld:
            parameter.grad = None

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not withheld:
            return
        for parameter, gradient in withheld.items():
            parameter.grad = gradient
        wait()  # nothing is late any more
        params = [param for group in optimizer.param_groups for param in group["params"]]
        others = {param: param.grad for param in params if param not in withheld}
        for parameter in others:
            parameter.grad = None
        try:
            optimizer.step()
        finally:
            for parameter, gradient in others.items():
                parameter.grad = gradient

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


@STRATEGIES.register("naive", order=2, aliases=("Naive DDP",))
class NaiveSync(Strategy):
    """After the backward pass, all-reduce every parameter's gradient, one after the other."""

    def _reduce(self, unused: Sequence[int], *, wait: bool) -> Sequence[int]:
        for parameter in self.parameters:
            assert parameter.grad is not None
            self._averager.all_reduce([parameter.grad]).wait()
        return unused_everywhere(unused, len(self.parameters), self.ranks, self.traffic)


@STRATEGIES.register("flat", order=3, aliases=("naive bucketed",), uses=("reduce_dtype",), packs="all")
class FlatSync(Strategy):
    """After the backward pass, copy all gradients of a device and dtype into one tensor and all-reduce that."""

    def _reduce(self, unused: Sequence[int], *, wait: bool) -> Sequence[int]:
        pending = []
        for bucket in fill_buckets(self.parameters, capacity=sys.maxsize):
            reduce_dtype = reduce_dtype_for(bucket[0].dtype, self.config.reduce_dtype)
            pending.append(average_bucket(bucket, self._averager, reduce_dtype, pack=True))
        for mean in pending:
            mean.wait()
        return unused_everywhere(unused, len(self.parameters), self.ranks, self.traffic)
