"""Gradient buckets: which parameters share one, when a bucket is launched, and how its gradients are averaged.

Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training". A bucket is launched inside
the backward pass, when its last gradient is ready, so that communication overlaps the rest of the pass.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _unflatten_dense_tensors
from torch.utils.hooks import RemovableHandle

from lmkit.errors import LmkitError
from lmkit.parallel.collectives import Averager, reduce_dtype_for
from lmkit.parallel.ranks import Ranks

MIB = 2**20
LAST_BUCKET_BYTES = 1 * MIB
"""Size of the last bucket. No backward pass is left to overlap its reduction, so it is kept small."""


# --- Planning: which parameters share a bucket.


def plan_buckets(
    in_ready_order: Sequence[nn.Parameter], capacity: int, reduce_dtype: str = "fp32"
) -> list[list[nn.Parameter]]:
    """Fill buckets as `fill_buckets` does; the last `LAST_BUCKET_BYTES` (at least one parameter) get their own."""
    cut = max(0, len(in_ready_order) - 1)
    last_bytes = sum(bytes_of(parameter, reduce_dtype) for parameter in in_ready_order[cut:])
    while cut > 0 and last_bytes + bytes_of(in_ready_order[cut - 1], reduce_dtype) <= LAST_BUCKET_BYTES:
        cut -= 1
        last_bytes += bytes_of(in_ready_order[cut], reduce_dtype)
    body, end = in_ready_order[:cut], in_ready_order[cut:]
    return [*fill_buckets(body, capacity, reduce_dtype), *fill_buckets(end, capacity, reduce_dtype)]


def fill_buckets(
    in_ready_order: Sequence[nn.Parameter], capacity: int, reduce_dtype: str = "fp32"
) -> list[list[nn.Parameter]]:
    """Fill buckets until each has at least `capacity` bytes in `reduce_dtype`. A bucket has one device and dtype.

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
        if sum(bytes_of(p, reduce_dtype) for p in bucket) >= capacity:
            closed.append(filling.pop((parameter.device, parameter.dtype)))
    closed.extend(filling.values())
    ready_at = {parameter: position for position, parameter in enumerate(in_ready_order)}
    return sorted(closed, key=lambda bucket: ready_at[bucket[-1]])


def bytes_of(parameter: nn.Parameter, reduce_dtype: str) -> int:
    """Return the size of the parameter's gradient when it is reduced."""
    return parameter.numel() * reduce_dtype_for(parameter.dtype, reduce_dtype).itemsize


def order_of_first_rank(
    seen: Sequence[nn.Parameter], parameters: Sequence[nn.Parameter], ranks: Ranks
) -> list[nn.Parameter]:
    """Return all `parameters`: first those `seen` on rank 0, in that order, then the others. Collective.

    The order is equal on every rank. So all ranks plan the same buckets, and when a backward pass raises, all have
    launched the same ones.
    """
    index_of = {parameter: index for index, parameter in enumerate(parameters)}
    order = list(dict.fromkeys([*(index_of[parameter] for parameter in seen), *index_of.values()]))
    if ranks.world_size > 1:
        of_first = torch.tensor(order, device=ranks.device)
        dist.broadcast(of_first, src=0)
        order = of_first.tolist()
    return [parameters[index] for index in order]


# --- Reducing: one all-reduce for all gradients of a bucket.


class ReducingBucket:
    """Start averaging the gradients of `parameters` (one device and dtype, none of them None) with one all-reduce.

    One grouped call of the backend averages them in place, without a flat tensor. Only gradients that are reduced in
    another dtype are packed into a flat tensor and copied back.

    Args:
        pack: always pack. `parameter.grad` becomes a view of the flat tensor, and nothing is copied back.
        extra: further tensors of `reduce_dtype` to average in the same call.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        averager: Averager,
        *,
        reduce_dtype: torch.dtype,
        pack: bool = False,
        extra: Sequence[torch.Tensor] = (),
    ) -> None:
        self._gradients = tensors = gradients_of(parameters)
        self._views: list[torch.Tensor] | None = None
        first = tensors[0]
        if pack or reduce_dtype != first.dtype:
            flat = torch.empty(sum(g.numel() for g in tensors), dtype=reduce_dtype, device=first.device)
            views = list(_unflatten_dense_tensors(flat, tensors))
            torch._foreach_copy_(views, tensors)
            if reduce_dtype == first.dtype:
                for parameter, view in zip(parameters, views, strict=True):
                    parameter.grad = view
            else:
                self._views = views
            tensors = [flat]
        self._pending = averager.all_reduce([*tensors, *extra])

    def wait(self) -> None:
        """Wait until the bucket's gradients are the mean (on GPUs the current stream waits, not the host)."""
        self._pending.wait()
        if self._views is not None:
            torch._foreach_copy_(self._gradients, self._views)

    def abandon(self) -> None:
        """Wait for the collective and discard its result."""
        self._pending.abandon()


def gradients_of(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Return every parameter's gradient; all of them must have one."""
    gradients = [gradient for parameter in parameters if (gradient := parameter.grad) is not None]
    assert len(gradients) == len(parameters)
    return gradients


# --- Launching: hooks that notice when a bucket is complete.


class BucketHooks:
    """Launch buckets inside the backward pass that completes them, strictly in the order of their index.

    Ranks whose gradients become ready in different orders would otherwise pair different collectives, and hang or mix
    up gradients. A bucket that is ready early waits for the buckets before it.

    At first every parameter has a hook. A hook costs the host microseconds in every step. Once the order in which
    gradients become ready is known, `watch_ends` keeps only the hooks of the pass's first parameter and of each
    bucket's last. Then `grad is not None` has to mean that a gradient is complete, which holds only if every grad was
    None when the pass began. If one was not, or gradients accumulate, `watch_all` restores all hooks.

    Args:
        buckets: the parameters of each bucket; each parameter is in one bucket.
        launch: called with the index of a bucket.
        abandon: called when a pass begins after one that raised; must forget what the earlier pass launched.
        is_paused: whether gradients are being accumulated now, so that nothing is launched.

    Attributes:
        order: parameters in the order in which they became ready; recorded only while `watches_all`.
        watches_all: whether every parameter has a hook.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[nn.Parameter]],
        launch: Callable[[int], None],
        abandon: Callable[[], None],
        is_paused: Callable[[], bool],
    ) -> None:
        self.order: list[nn.Parameter] = []
        self._buckets = [list(bucket) for bucket in buckets]
        self._launch = launch
        self._abandon = abandon
        self._is_paused = is_paused
        self._handles: list[RemovableHandle] = []
        self._pass: int | None
        self._pass_ends: Callable[[], object] = lambda: None
        self.watch_all()
        self.reset()

    def watch_all(self) -> None:
        """Put a hook on every parameter."""
        self.close()
        self.order.clear()
        self.watches_all = True
        self._handles = [
            on_gradient(parameter, self._on_gradient, index)
            for index, bucket in enumerate(self._buckets)
            for parameter in bucket
        ]

    def watch_ends(self, in_ready_order: Sequence[nn.Parameter]) -> None:
        """Keep hooks on the first of all parameters, and on the last of each bucket.

        Args:
            in_ready_order: all parameters. In a pass with another order the buckets are launched later.
        """
        if not in_ready_order:
            return
        self.close()
        self.watches_all = False
        position = {parameter: index for index, parameter in enumerate(in_ready_order)}
        watched = [in_ready_order[0], *(max(bucket, key=position.__getitem__) for bucket in self._buckets)]
        self._handles = [on_gradient(parameter, self._on_watched) for parameter in dict.fromkeys(watched)]

    def close(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def without_gradient(self) -> list[nn.Parameter]:
        """Return, after a pass, the parameters that it gave no gradient."""
        left = self._buckets[self._next :]
        return [parameter for bucket in left for parameter in bucket if parameter.grad is None]

    def launch_rest(self) -> None:
        """Launch the remaining buckets, complete or not, and start over."""
        self._launch_while(lambda index: True)
        self._start_over()

    def reset(self) -> None:
        """Forget the pass: nothing is ready, nothing was launched."""
        self._start_over()
        self.order.clear()

    def check_finished(self) -> None:
        """Refuse to add to gradients of an unfinished step: they may be in flight, or moved out of `parameter.grad`.

        Raises:
            LmkitError: a backward pass has ended and was not finished.
        """
        if self._pass_has_ended:
            raise LmkitError(
                "parallel.unfinished_backward",
                "a backward pass began before finish() was called for an earlier one, whose gradients have left",
                hint="wrap all but the last backward pass of a step in no_sync(), and checkpoint with "
                "use_reentrant=False; to drop a step, call reset()",
            )

    # Hooks. Autograd records nothing inside a backward pass; a no_grad here would only cost time.

    def _on_gradient(self, bucket: int, parameter: nn.Parameter) -> None:
        if self._is_paused():
            return
        if self._begin():
            self.order.clear()
        self.order.append(parameter)
        self._waiting[bucket] -= 1
        assert self._waiting[bucket] >= 0, "a parameter became ready twice in one pass"
        self._launch_while(lambda index: self._waiting[index] == 0)

    def _on_watched(self, parameter: nn.Parameter) -> None:
        if self._is_paused():
            return
        # A gradient from before the pass does not show that this pass completed it: the pass adds to it.
        if self._begin() and any(
            p is not parameter and p.grad is not None for bucket in self._buckets for p in bucket
        ):
            self.watch_all()
        if not self.watches_all:
            self._launch_while(lambda index: all(p.grad is not None for p in self._buckets[index]))

    def _launch_while(self, is_ready: Callable[[int], bool]) -> None:
        while self._next < len(self._buckets) and is_ready(self._next):
            self._next += 1  # first, so that a launch that raises is not repeated
            self._launch(self._next - 1)

    def _begin(self) -> bool:
        """Return whether the backward pass that runs is a new one; see `check_finished`."""
        # The number of the pass. There is no public function for it.
        current = torch._C._current_graph_task_id()
        if self._pass == current:
            return False
        if self._pass is not None:
            self.check_finished()
            if self._pass_ends() is not None:
                return False  # a reentrant checkpoint began this pass inside the outer one, which goes on
            self._abandon()
            self._start_over()
        self._pass = current

        def ends() -> None:
            if self._pass == current:
                self._pass_has_ended = True

        self._pass_ends = at_end_of_pass(ends)
        return True

    def _start_over(self) -> None:
        self._waiting = [len(bucket) for bucket in self._buckets]
        self._next = 0
        self._pass = None
        self._pass_has_ended = False


def at_end_of_pass(callback: Callable[[], None]) -> weakref.ref[Callable[[], None]]:
    """Let autograd call `callback` when the backward pass that runs ends. The reference dies if the pass raises."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
    return weakref.ref(callback)


def on_gradient(parameter: nn.Parameter, method: Callable[..., None], *before: Any) -> RemovableHandle:
    """Call the bound `method(*before, parameter)` whenever a backward pass has completed the parameter's gradient.

    The hook refers to the method's object weakly. PyTorch holds hooks where Python's garbage collector does not look:
    a strong reference would keep the object, with its model and optimizer state, until the process ends.
    """
    reference = weakref.WeakMethod(method)

    def hook(parameter: nn.Parameter) -> None:
        method = reference()
        if method is not None:
            method(*before, parameter)

    return parameter.register_post_accumulate_grad_hook(hook)


def in_each_pass(tensors: Sequence[torch.Tensor], count: int, call: Callable[[], None]) -> None:
    """Call `call` in each backward pass when `count` of the tensors have their gradients.

    `register_multi_grad_hook` would make a reference cycle: its hook holds the graph, which holds the hook.
    """
    arrived: Counter[int] = Counter()

    def hook(gradient: torch.Tensor) -> None:
        number = torch._C._current_graph_task_id()
        arrived[number] += 1
        if arrived[number] == count:
            call()

    for tensor in tensors:
        tensor.register_hook(hook)


def runs_backward() -> bool:
    """Return whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1
