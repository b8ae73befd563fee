"""Threads that share out the chunks of a text. They run side by side as long as their work leaves the interpreter's
lock alone, as compiled code, numpy, hashing and files do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


def share_out(
    items: Iterable[T],
    workers: Sequence[Callable[[T], R]],
    finish: Callable[[T, R], None] | None = None,
) -> None:
    """Pass every item to one of the workers, and every result to `finish`, in the order of the items.

    Each worker has a thread, which takes the next item, works on it, and finishes it when its turn comes; one worker
    does it all in the calling thread. So `items` and `finish` are never entered by two threads at a time, and
    one result per worker at most waits for its turn. Without `finish` nobody waits, and results are dropped.
    An error anywhere ends all threads before it is raised.
    """
    if len(workers) == 1:
        for item in items:
            result = workers[0](item)
            if finish is not None:
                finish(item, result)
        return
    line = _Line(items, finish)

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

    def __init__(self, items: Iterable[T], finish: Callable[[T, R], None] | None) -> None:
        self._items = enumerate(items)
        self._finish = finish
        self._taking = threading.Lock()
        self._finishing = threading.Condition()
        self._num_finished = 0
        self._closed = False

    def take(self) -> tuple[int, T] | None:
        """Return the next item with its number, None when there is no more."""
        with self._taking:
            return None if self._closed else next(self._items, None)

    def finish(self, number: int, item: T, result: R) -> None:
        """Wait until all items before this one are finished, then finish it; do nothing once closed."""
        if self._finish is None:
            return
        with self._finishing:
            self._finishing.wait_for(lambda: self._closed or self._num_finished == number)
            if not self._closed:
                self._finish(item, result)
                self._num_finished += 1
                self._finishing.notify_all()

    def close(self) -> None:
        with self._finishing:
            self._closed = True
            self._finishing.notify_all()
