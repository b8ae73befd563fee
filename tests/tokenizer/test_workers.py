from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from lmkit.tokenizer.workers import share_out


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_results_are_finished_in_order_whoever_is_slow(workers: int) -> None:
    """The first item is held back until the others have been worked on: they must wait for it."""
    done = threading.Barrier(min(workers, 3))
    finished = []

    def work(item: int) -> int:
        if item < done.parties:
            done.wait()  # all of these are under way at once
        return item * item

    share_out(range(100), [work] * workers, lambda item, result: finished.append((item, result)))
    assert finished == [(i, i * i) for i in range(100)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("workers", [2, 3, 8])
def test_who_is_ahead_goes_on_but_not_far(workers: int) -> None:
    """The first item is held back until the others are as far ahead as they may be: two results per thread wait."""
    most_ahead = (
        2 * workers + workers - 2
    )  # these wait, the first is at work, and the others wait to hand in more
    far_ahead = threading.Event()
    finished: list[int] = []
    ahead = []

    def work(item: int) -> int:
        ahead.append(item - len(finished))
        if item == most_ahead:
            far_ahead.set()
        if item == 0:
            assert far_ahead.wait(60)
        return item

    share_out(range(200), [work] * workers, lambda item, result: finished.append(result))
    assert finished == list(range(200))
    assert max(ahead) == most_ahead


@pytest.mark.timeout(120)
def test_one_thread_finishes_at_a_time() -> None:
    """The second result is handed in while the first is being finished, and its thread goes on to the third item."""
    finishing, going_on = threading.Event(), threading.Event()
    inside = threading.Lock()

    def work(item: int) -> None:
        if item == 1:
            assert finishing.wait(60)
        elif item == 2:
            going_on.set()

    def finish(item: int, result: None) -> None:
        assert inside.acquire(blocking=False)
        if item == 0:
            finishing.set()
            assert going_on.wait(60)
        inside.release()

    share_out(range(10), [work] * 2, finish)


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_without_finish_every_item_is_worked_on_once(workers: int) -> None:
    done: list[int] = []
    share_out(range(100), [done.append] * workers)
    assert sorted(done) == list(range(100))


@pytest.mark.timeout(60)
def test_without_finish_nobody_waits() -> None:
    """The first item is held back until all others have been worked on, by the other thread alone."""
    others = threading.Event()
    done = []

    def work(item: int) -> None:
        if item == 0:
            assert others.wait(60)
        done.append(item)
        if len(done) == 99:
            others.set()

    share_out(range(100), [work] * 2)
    assert done == [*range(1, 100), 0]


def test_one_worker_is_the_calling_thread() -> None:
    threads = []
    share_out("ab", [lambda item: threads.append(threading.current_thread())], lambda item, result: None)
    assert threads == [threading.main_thread()] * 2


@pytest.mark.parametrize("where", ["items", "work", "finish"])
@pytest.mark.parametrize("workers", [1, 2, 8])
def test_an_error_anywhere_ends_all_threads(where: str, workers: int) -> None:
    finished = []

    def items() -> Iterator[int]:
        for i in range(1000):
            if where == "items" and i == 50:
                raise KeyError(i)
            yield i

    def work(item: int) -> int:
        if where == "work" and item == 50:
            raise KeyError(item)
        return item

    def finish(item: int, result: int) -> None:
        if where == "finish" and item == 50:
            raise KeyError(item)
        finished.append(item)

    before = threading.active_count()
    with pytest.raises(KeyError, match="50"):
        share_out(items(), [work] * workers, finish)
    assert threading.active_count() == before
    assert finished == list(range(len(finished)))
    assert len(finished) <= 50


def test_threads_work_side_by_side() -> None:
    both = threading.Barrier(2, timeout=60)
    share_out(range(2), [lambda item: both.wait()] * 2, lambda item, result: None)


def test_the_command_line_keeps_numpy_from_spinning_on_a_core_of_the_workers() -> None:
    code = (
        "import os, sys; from lmkit.__main__ import main; sys.argv = ['lmkit', '--version']\n"
        "try: main()\n"
        "except SystemExit: print(os.environ['OPENBLAS_THREAD_TIMEOUT'], 'numpy' in sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_THREAD_TIMEOUT"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[-2:] == ["4", "False"]  # set, and before numpy reads it


@pytest.mark.timeout(60)
def test_who_waits_for_the_turn_of_one_that_failed_is_set_free() -> None:
    failing = threading.Event()

    def work(item: int) -> int:
        assert failing.wait(60)
        return item

    def fail(item: int) -> int:
        failing.set()
        raise KeyError(item)

    with pytest.raises(KeyError):  # the first thread, which is asked first, waits for the second's turn
        share_out(range(1000), [work, fail], lambda item, result: None)
