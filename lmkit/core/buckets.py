"""Gradient buckets: average the gradients of all ranks while the backward pass still runs.

Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training". Parameters share buckets in
the order in which their gradients become ready. When a bucket's last gradient is ready, one all-reduce averages the
bucket's gradients. It overlaps the rest of the backward pass.

    buckets = GradientBuckets(model.parameters(), capacity=25 * MIB)
    loss_function(model(inputs), targets).backward()   # each rank with its own part of the batch
    buckets.finish()                                   # every gradient is the mean over the ranks
    optimizer.step()
    optimizer.zero_grad()
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

MIB = 2**20


# Which parameters share a bucket.


def fill_buckets(
    in_ready_order: Sequence[nn.Parameter],
    capacity: int,
    bytes_of: Callable[[nn.Parameter], int] = lambda parameter: parameter.nbytes,
) -> list[list[nn.Parameter]]:
    """Fill buckets until each has at least `capacity` bytes. A bucket has one device and dtype.

    The parameter that reaches the capacity closes its bucket, as in PyTorch's reducer: one more call costs the host
    more time than a slightly larger bucket costs the link.

    Returns:
        The buckets in the order in which their last parameters become ready.
    """
    closed: list[list[nn.Parameter]] = []
    filling: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
    for parameter in in_ready_order:
        bucket = filling.setdefault((parameter.device, parameter.dtype), [])
        bucket.append(parameter)
        if sum(map(bytes_of, bucket)) >= capacity:
            closed.append(filling.pop((parameter.device, parameter.dtype)))
    ready_at = {parameter: position for position, parameter in enumerate(in_ready_order)}
    return sorted([*closed, *filling.values()], key=lambda bucket: ready_at[bucket[-1]])


def order_of_first_rank(
    seen: Iterable[nn.Parameter], parameters: Sequence[nn.Parameter]
) -> list[nn.Parameter]:
    """Return all `parameters`: first those `seen` on rank 0, in that order, then the others. Collective.

    The order is equal on every rank, so that all ranks plan the same buckets and launch them in the same order.
    """
    index_of = {parameter: index for index, parameter in enumerate(parameters)}
    order = list(dict.fromkeys([*(index_of[parameter] for parameter in seen), *index_of.values()]))
    if order and dist.is_initialized():
        of_first = torch.tensor(order, device=parameters[0].device)
        dist.broadcast(of_first, src=0)
        order = of_first.tolist()
    return [parameters[index] for index in order]


# One all-reduce for the gradients of a bucket.


class Work(Protocol):
    """An asynchronous collective. On GPUs `wait` holds the current stream, not the host."""

    def wait(self) -> object: ...


@dataclass
class PendingMean:
    """A reduction in flight; `wait` makes `results` the mean over the ranks and returns them.

    In `average`, `results` is one flat tensor, and `wait` copies its parts back into the gradients. `lmkit.parallel`
    has reductions of several collectives, and some that need no copy.

    Attributes:
        works: the collectives.
        divide_by: the number of ranks if they sum; 1 if they average.
        copies: two lists of tensors; `wait` copies the second, views of `results`, into the first.
    """

    works: Sequence[Work]
    results: list[torch.Tensor]
    divide_by: int = 1
    copies: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None

    def wait(self) -> list[torch.Tensor]:
        self.wait_for_works()
        if self.divide_by != 1:
            torch._foreach_div_(self.results, self.divide_by)
        if self.copies is not None:
            torch._foreach_copy_(*self.copies)
        return self.results

    def wait_for_works(self) -> None:
        """Wait for the collectives; leave `results` as they are."""
        for work in self.works:
            work.wait()


def average(tensors: Sequence[torch.Tensor]) -> PendingMean:
    """Start averaging tensors of one dtype and device over the ranks, with one all-reduce. Collective."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    parts = flat.split([tensor.numel() for tensor in tensors])
    views = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
    work = dist.all_reduce(flat, async_op=True)
    assert work is not None
    return PendingMean([work], [flat], dist.get_world_size(), (list(tensors), views))


def gradients_of(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Return every parameter's gradient; all of them must have one."""
    gradients = [gradient for parameter in parameters if (gradient := parameter.grad) is not None]
    assert len(gradients) == len(parameters)
    return gradients


# Hooks that notice when a bucket is complete.


class GradientBuckets:
    """Average gradients, bucket by bucket: begin inside the backward pass, end in `finish`.

    Buckets are launched strictly in the order of their indices; one that is ready early waits for those before it.
    Ranks whose gradients become ready in different orders would otherwise pair different collectives, and hang or mix
    up gradients.

    In the first step, nothing is launched before `finish`, which plans the buckets in the order in which gradients
    became ready on rank 0. Later steps launch each bucket inside the backward pass.

    Args:
        parameters: parameters that need gradients, the same on every rank.
        capacity: a bucket closes at this many bytes or more.

    Attributes:
        buckets: the parameters of each bucket; empty before the first `finish`.
        order: the parameters whose gradients became ready in this pass, in that order; a dict as an ordered set.
        in_ready_order: all parameters, in the order of the first pass on rank 0; None before the first `finish`.
        is_paused: set it to accumulate gradients: no hook launches anything.
        pending: the reductions in flight.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], capacity: int = 25 * MIB) -> None:
        self.parameters = list(parameters)
        self.capacity = capacity
        self.is_paused = False
        self.order: dict[nn.Parameter, None] = {}
        self.in_ready_order: list[nn.Parameter] | None = None
        self.pending: list[PendingMean] = []
        self._handles: list[RemovableHandle] = []
        self._use([])
        self._start_over()
        self.watch()

    def watch(self) -> None:
        """Put a hook on every parameter."""
        self.close()
        self._handles = [on_gradient(parameter, self._on_gradient) for parameter in self.parameters]

    def close(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def plan(self, in_ready_order: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Return the buckets in the order in which they are launched."""
        return fill_buckets(in_ready_order, self.capacity)

    def launch(self, index: int) -> None:
        """Start averaging the gradients of a bucket; none of them is None. Collective."""
        self.pending.append(average(gradients_of(self.buckets[index])))

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if self.is_paused:
            return
        if parameter in self.order:
            raise RuntimeError(
                "a backward pass began before finish() or reset() was called for an earlier one"
            )
        self.order[parameter] = None
        if self.buckets:
            self._missing[self._bucket_of[parameter]] -= 1
            self._launch_while(lambda index: self._missing[index] == 0)

    def _launch_while(self, is_ready: Callable[[int], bool]) -> None:
        while self._next < len(self.buckets) and is_ready(self._next):
            self._next += 1  # first: a launch that raised is not repeated by `finish`
            self.launch(self._next - 1)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait until every gradient is the mean over the ranks. Collective.

        A parameter that was not used gets a gradient of zeros, so that AdamW decays it; a single process keeps None
        and skips it. Its bucket and all after it are launched only here.
        """
        for parameter in self.without_gradient():
            parameter.grad = torch.zeros_like(parameter)
        self.launch_rest()
        self.wait()

    def without_gradient(self) -> list[nn.Parameter]:
        """Return, after a pass, the parameters that it gave no gradient."""
        left = self.buckets[self._next :] if self.buckets else [self.parameters]
        return [parameter for bucket in left for parameter in bucket if parameter.grad is None]

    def launch_rest(self) -> None:
        """Launch the remaining buckets and start over. Every gradient must be there. Collective."""
        # ZeRO-1 has buckets before the order is known, and some ranks may have launched them: they come first.
        self._launch_while(lambda index: True)
        if self.in_ready_order is None:
            self.settle()
            self._launch_while(lambda index: True)
        self._start_over()

    def settle(self) -> None:
        """Plan the buckets in the order of rank 0's gradients; parameters without one come last. Collective."""
        self.in_ready_order = order_of_first_rank(self.order, self.parameters[::-1])
        self._use(self.plan(self.in_ready_order))

    def _use(self, buckets: list[list[nn.Parameter]]) -> None:
        self.buckets = buckets
        self._bucket_of = {parameter: index for index, bucket in enumerate(buckets) for parameter in bucket}

    def wait(self, leave: int = 0) -> None:
        """Wait for the reductions in flight, but for the last `leave`."""
        while len(self.pending) > leave:
            self.pending.pop(0).wait()

    def abandon(self) -> None:
        """Wait for the reductions in flight and discard their results."""
        while self.pending:
            self.pending.pop(0).wait_for_works()

    def reset(self) -> None:
        """Forget a pass that raised, or whose gradients are not needed; the caller drops the gradients."""
        self.abandon()
        self._start_over()

    def _start_over(self) -> None:
        self.order.clear()
        self._next = 0  # the bucket that is launched next
        self._missing = [len(bucket) for bucket in self.buckets]


def on_gradient(
    parameter: nn.Parameter, method: Callable[[Any], None], index: int | None = None
) -> RemovableHandle:
    """Call the bound `method(parameter)` whenever a backward pass has completed the parameter's gradient.

    The hook refers to the method's object weakly. PyTorch holds hooks where Python's garbage collector does not look:
    a strong reference would keep the object, with its model and optimizer state, until the process ends.

    Args:
        index: passed in place of the parameter, because hashing a parameter takes the host longer than a number.
    """
    reference = weakref.WeakMethod(method)

    def hook(ready: nn.Parameter) -> None:
        bound = reference()
        if bound is not None:
            bound(ready if index is None else index)

    return parameter.register_post_accumulate_grad_hook(hook)
