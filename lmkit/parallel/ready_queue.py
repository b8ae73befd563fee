"""Buckets become ready in whatever order; they are launched in the same order on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


class ReadyQueue:
    """Calls `launch(i)` once every member of buckets 0 to i is ready: strictly in the order of the index.

    Ranks whose gradients come in different orders would otherwise pair different collectives, and hang or mix
    up gradients. A bucket that is ready early waits for those before it.

    Args:
        members: how many members each bucket has.
        abandon: called when a new backward pass begins while an earlier one is unfinished: it broke off with an
            exception, and what was launched for it must be forgotten.
    """

    def __init__(
        self, members: Sequence[int], launch: Callable[[int], None], abandon: Callable[[], None]
    ) -> None:
        self._members = list(members)
        self._launch = launch
        self._abandon = abandon
        self._backward: int | None = None
        self.reset()

    def mark(self, bucket: int) -> None:
        """One more member of `bucket` is ready. Called inside a backward pass."""
        backward = torch._C._current_graph_task_id()  # its number; autograd tells it nowhere else
        if self._backward not in (None, backward):
            self._abandon()
            self.reset()
        self._backward = backward
        self._waiting[bucket] -= 1
        assert self._waiting[bucket] >= 0, "a member was marked twice"
        while self._next < len(self._members) and self._waiting[self._next] == 0:
            self._next += 1  # first, so that a launch that raises is not repeated
            self._launch(self._next - 1)

    def launch_rest(self) -> None:
        """Launch what is left, complete or not, and start over."""
        while self._next < len(self._members):
            self._next += 1
            self._launch(self._next - 1)
        self.reset()

    def reset(self) -> None:
        """Nothing is ready, nothing was launched."""
        self._waiting = list(self._members)
        self._next = 0
        self._backward = None
