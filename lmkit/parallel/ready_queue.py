"""Buckets become ready in whatever order; they are launched in the same order on every rank."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from lmkit.errors import LmkitError


class ReadyQueue:
    """Launches buckets strictly in the order of their index.

    Ranks whose gradients come in different orders would otherwise pair different collectives, and hang or mix
    up gradients. A bucket that is ready early waits for those before it. Either every gradient is counted
    (`mark`), or buckets are looked at now and then (`launch_while`).

    Args:
        members: how many members each bucket has.
        launch: called with a bucket's index.
        abandon: called when a new backward pass begins after one that broke off with an exception: what was
            launched for that one must be forgotten.
    """

    def __init__(
        self, members: Sequence[int], launch: Callable[[int], None], abandon: Callable[[], None]
    ) -> None:
        self._members = list(members)
        self._launch = launch
        self._abandon = abandon
        self._backward: int | None
        self._ends: Callable[[], object] = lambda: None
        self.reset()

    @property
    def launched(self) -> int:
        """How many buckets were launched in this step."""
        return self._next

    def begin(self) -> bool:
        """Called inside a backward pass: whether it is a new one.

        Raises:
            LmkitError: see `check_nothing_is_left`.
        """
        backward = torch._C._current_graph_task_id()  # its number; autograd tells it nowhere else
        if self._backward == backward:
            return False
        if self._backward is not None:
            self.check_nothing_is_left()
            if self._ends() is not None:
                return False  # it goes on around this one, which a checkpoint of the reentrant kind began
            self._abandon()
            self.reset()
        self._backward = backward

        def ends() -> None:
            self._has_ended = True

        # Autograd calls it when the pass has come to its end, and lets go of it, uncalled, where that broke off.
        torch.autograd.Variable._execution_engine.queue_callback(ends)
        self._ends = weakref.ref(ends)
        return True

    def check_nothing_is_left(self) -> None:
        """Called before gradients are added to: those of a whole pass may be on their way, or gone from where the
        next pass would add to them.

        Raises:
            LmkitError: a backward pass has ended, and nobody finished it.
        """
        if self._has_ended:
            raise LmkitError(
                "a backward pass began before finish() was called for an earlier one, whose gradients have left",
                hint="wrap all but the last backward pass of a step in no_sync(), and checkpoint with "
                "use_reentrant=False; to drop a step, call reset()",
            )

    def mark(self, bucket: int) -> None:
        """One more member of `bucket` is ready."""
        self._waiting[bucket] -= 1
        assert self._waiting[bucket] >= 0, "a member was marked twice"
        self.launch_while(lambda index: self._waiting[index] == 0)

    def launch_while(self, is_ready: Callable[[int], bool]) -> None:
        """Launch the next buckets for as long as they are ready."""
        while self._next < len(self._members) and is_ready(self._next):
            self._next += 1  # first, so that a launch that raises is not repeated
            self._launch(self._next - 1)

    def launch_rest(self) -> None:
        """Launch what is left, complete or not, and start over."""
        self.launch_while(lambda index: True)
        self.reset()

    def reset(self) -> None:
        """Nothing is ready, nothing was launched."""
        self._waiting = list(self._members)
        self._next = 0
        self._backward = None
        self._has_ended = False
