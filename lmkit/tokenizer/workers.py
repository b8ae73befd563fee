"""Threads that share out the chunks of a text. They run side by side as long as their work leaves the interpreter's
lock alone, as compiled code, numpy, hashing and files do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")

_AHEAD = 2  # results per worker that may wait for an earlier one


def share_out(
    items: Iterable[T],
    workers: Sequence[Callable[[T], R]],
    finish: Callable[[T, R], None] | None = None,
) -> None:
    """Pass every item to one of the workers, and every result to `finish`, in the order of the items.

    Each worker has a thread, which takes the next item, works on it, hands in the result, and goes on: items differ,
    and nobody is to wait for a slow one. Whoever hands in the result that is due finishes it and what waited for it;
    one worker does it all in the calling thread. So `items` and `finish` are never entered by two threads at a time,
    and a few results per worker at most wait (`_AHEAD`). Without `finish` results are dropped. An error anywhere ends
    all threads before it is raised.
    """
    if len(workers) == 1:
        for item in items:
            result = workers[0](item)
            if finish is not None:
                finish(item, result)
        return
    line = _Line(items, finish, _AHEAD * len(workers))

    def run(worker: Callable[[T], R]) -> None:
        try:
            while (numbered := line.take()) is not None:
                number, item = numbered
                line.finish(number, item, worker(item))
        except BaseException:
            line.close()  # or the others would work to the end before anybody hears of it
            raise

    with ThreadPoolExecutor(len(workers)) as pool:
        try:
            for job in [pool.submit(run, worker) for worker in workers]:
                job.result()
        finally:
            line.close()  # Ctrl-C arrives here


class _Line(Generic[T, R]):
    """Items leave at the front, one at a time, and are finished in the same order."""

    def __init__(self, items: Iterable[T], finish: Callable[[T, R], None] | None, most_waiting: int) -> None:
        self._items = enumerate(items)
        self._finish = finish
        self._most_waiting = most_waiting
        self._taking = threading.Lock()
        self._changed = threading.Condition()  # guards all below, but that `take` only looks at `_closed`
        self._results: dict[int, tuple[T, R]] = {}
        self._num_finished = 0
        self._closed = False

    def take(self) -> tuple[int, T] | None:
        """Return the next item with its number, None when there is no more."""
        with self._taking:
            return None if self._closed else next(self._items, None)

    def finish(self, number: int, item: T, result: R) -> None:
        """Hand in a result, and finish all that are due."""
        if self._finish is None:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._closed or number < self._num_finished + self._most_waiting)
            self._results[number] = item, result
        while True:
            with self._changed:
                due = None if self._closed else self._results.pop(self._num_finished, None)
            if due is None:  # not here yet, or being finished by a thread that will see to this one too
                return
            self._finish(*due)
            with self._changed:
                self._num_finished += 1
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
