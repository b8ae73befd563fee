"""Watches a backward pass and launches buckets of gradients as they fill, with as few hooks as it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from lmkit.parallel.gradient_hooks import on_gradient
from lmkit.parallel.process_group import Ranks
from lmkit.parallel.ready_queue import ReadyQueue


class GradientWatch:
    """Launches buckets in the order of their index, each inside the backward pass that completes it.

    At first every parameter has a hook. Each costs the host microseconds in every step, so once the order in which
    gradients become ready is known (`watch_ends`), only what ends a bucket has one, and what begins the pass. That
    a gradient is there then means that it is complete: only where a pass begins without any. One that does not gets
    all hooks back, and so does accumulation (`watch_all`).

    Args:
        buckets: parameters that are launched together; each parameter is in one.
        launch, abandon: see `ReadyQueue`.
        is_paused: whether gradients are being accumulated now, and nothing is launched.

    Attributes:
        order: parameters as they became ready in this pass, while all are watched.
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
        self._queue = ReadyQueue([len(bucket) for bucket in self._buckets], launch, abandon)
        self._is_paused = is_paused
        self._handles: list[RemovableHandle] = []
        self.watch_all()

    def watch_all(self) -> None:
        """From now on: a hook on every parameter."""
        self.close()
        self.order.clear()
        self.watches_all = True
        self._handles = [
            on_gradient(parameter, self._on_gradient, index)
            for index, bucket in enumerate(self._buckets)
            for parameter in bucket
        ]

    def watch_ends(self, in_ready_order: Sequence[nn.Parameter]) -> None:
        """From now on: hooks on the parameter that ends each bucket, and on the first of all.

        Args:
            in_ready_order: all parameters. A pass in another order is as right, its buckets are launched later.
        """
        if not in_ready_order:
            return
        self.close()
        self.watches_all = False
        position = {parameter: number for number, parameter in enumerate(in_ready_order)}
        watched = [in_ready_order[0], *(max(bucket, key=position.__getitem__) for bucket in self._buckets)]
        self._handles = [on_gradient(parameter, self._on_watched) for parameter in dict.fromkeys(watched)]

    def close(self) -> None:
        """No hooks any more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def check_nothing_is_left(self) -> None:
        """Called before a pass that only accumulates; see `ReadyQueue`."""
        self._queue.check_nothing_is_left()

    def without_gradient(self) -> list[nn.Parameter]:
        """After a pass: the parameters that it gave no gradient."""
        left = self._buckets[self._queue.launched :]
        return [parameter for bucket in left for parameter in bucket if parameter.grad is None]

    def launch_rest(self) -> None:
        """Launch what is left, complete or not, and start over."""
        self._queue.launch_rest()

    def reset(self) -> None:
        """Nothing is ready, nothing was launched."""
        self._queue.reset()
        self.order.clear()

    # The hooks. Autograd records nothing inside a backward pass; a no_grad there would only cost time.

    def _on_gradient(self, bucket: int, parameter: nn.Parameter) -> None:
        if self._is_paused():
            return
        if self._queue.begin():
            self.order.clear()
        self.order.append(parameter)
        self._queue.mark(bucket)

    def _on_watched(self, parameter: nn.Parameter) -> None:
        if self._is_paused():
            return
        if self._queue.begin() and not self._is_fresh_start(parameter):
            self.watch_all()
        if not self.watches_all:
            self._queue.launch_while(self._is_complete)

    def _is_fresh_start(self, parameter: nn.Parameter) -> bool:
        """Whether there is no gradient but this one: others would be from before, or came unwatched; this pass would
        add to them, and their presence would say nothing."""
        return all(p is parameter or p.grad is None for bucket in self._buckets for p in bucket)

    def _is_complete(self, index: int) -> bool:
        return all(parameter.grad is not None for parameter in self._buckets[index])


def order_of_first_rank(
    seen: Sequence[nn.Parameter], parameters: Sequence[nn.Parameter], ranks: Ranks
) -> list[nn.Parameter]:
    """All `parameters`: those `seen` on rank 0, in that order, then the others. A collective; the same on every rank,
    so that ranks plan the same buckets, and have the same ones under way where a pass breaks off.
    """
    number_of = {parameter: number for number, parameter in enumerate(parameters)}
    order = list(dict.fromkeys([*(number_of[parameter] for parameter in seen), *number_of.values()]))
    if ranks.world_size > 1:
        of_first = torch.tensor(order, device=ranks.device)
        dist.broadcast(of_first, src=0)
        order = of_first.tolist()
    return [parameters[number] for number in order]
