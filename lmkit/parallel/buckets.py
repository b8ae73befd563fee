"""Gradient buckets that notice passes which raise, and whose hooks take the host little time."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import nn

from lmkit.core.buckets import GradientBuckets, on_gradient
from lmkit.errors import LmkitError


class WatchedBuckets(GradientBuckets):
    """Launch buckets inside the backward pass, with few hooks: each costs the host microseconds in every step.

    At first every parameter has a hook. Once the order in which gradients become ready is known, `watch_ends` keeps
    only the hooks of the pass's first parameter and of each bucket's last. Then `grad is not None` has to mean that a
    gradient is complete, which holds only if every grad was None when the pass began. If one was not, or gradients
    accumulate, `watch` restores all hooks.

    Attributes:
        watches_all: whether every parameter has a hook. `order` is recorded only then.
    """

    _has_paused = False
    _pass: int | None = None
    _pass_ends: Callable[[], object]

    def watch(self) -> None:
        super().watch()
        self.order.clear()
        self.watches_all = True

    def watch_ends(self) -> None:
        """Keep hooks on the first of all parameters, and on the last of each bucket in `in_ready_order`."""
        if not (order := self.in_ready_order):
            return
        self.close()
        self.watches_all = False
        position = {parameter: index for index, parameter in enumerate(order)}
        watched = [order[0], *(max(bucket, key=position.__getitem__) for bucket in self.buckets)]
        self._handles = [on_gradient(parameter, self._on_watched) for parameter in dict.fromkeys(watched)]

    def settle(self) -> None:
        super().settle()
        if not self._has_paused:
            self.watch_ends()

    def pause(self) -> None:
        """Launch nothing until `is_paused` is unset. Refuse it inside a step, as `check_finished` does."""
        self.check_finished()
        self.is_paused = self._has_paused = True
        if not self.watches_all:
            self.watch()

    def check_finished(self) -> None:
        """Raise an LmkitError if a backward pass has ended and was not finished: its gradients may be in flight."""
        if self._pass_has_ended:
            raise LmkitError(
                "parallel.unfinished_backward",
                "a backward pass began before finish() was called for an earlier one, whose gradients have left",
                hint="wrap all but the last backward pass of a step in no_sync(), and checkpoint with "
                "use_reentrant=False; to drop a step, call reset()",
            )

    # Hooks. Autograd records nothing inside a backward pass; a no_grad here would only cost time.

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if not self.is_paused:
            self._begin()
        super()._on_gradient(parameter)

    def _on_watched(self, parameter: nn.Parameter) -> None:
        if self.is_paused:
            return
        # A gradient from before the pass does not show that this pass completed it: the pass adds to it.
        if self._begin() and any(
            p is not parameter and p.grad is not None for bucket in self.buckets for p in bucket
        ):
            self.watch()
        if not self.watches_all:
            self._launch_while(lambda index: all(p.grad is not None for p in self.buckets[index]))

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
            self.reset()
        self._pass = current

        def ends() -> None:
            if self._pass == current:
                self._pass_has_ended = True

        self._pass_ends = at_end_of_pass(ends)
        return True

    def _start_over(self) -> None:
        super()._start_over()
        self._pass = None
        self._pass_has_ended = False


def at_end_of_pass(callback: Callable[[], None]) -> weakref.ref[Callable[[], None]]:
    """Let autograd call `callback` when the backward pass that runs ends. The reference dies if the pass raises."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
    return weakref.ref(callback)


def in_each_pass(tensors: Sequence[torch.Tensor], count: int, call: Callable[[], None]) -> None:
    """Call `call` in each backward pass when `count` of the tensors have their gradients; unlike
    `register_multi_grad_hook`, whose hook holds the graph that holds the hook."""
    if len(tensors) == 1:
        tensors[0].register_hook(lambda _: call())
        return
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
