"""Start the ranks of one machine without torchrun (`--nproc N`), relay their progress, and end all when one fails.

Every rank is a fresh interpreter (a fork after torch was loaded can deadlock) with the environment that
`process_group` reads. This process hosts the rendezvous.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from lmkit.errors import LmkitError, UsageError, first_line, system_error
from lmkit.parallel.ranks import RankLost, hosted_store, shutdown
from lmkit.plugins import PLUGINS, load_plugin, plugin_error
from lmkit.streams import Progress, secure_streams

GRACE_S = 3.0
"""Seconds for ranks to report errors after the first failure, to end after SIGTERM or a second stopping signal."""
_POLL_S = 1.0
"""Seconds between polls, for signals that are delivered to another thread and do not interrupt a wait."""
_STOPPING = (signal.SIGTERM, signal.SIGINT)
_STOPPED = tuple(code for number in _STOPPING for code in (-number, 128 + number))


class RankFailed(LmkitError):
    """A rank ended without an error that could be forwarded: a signal, an exit code, or a foreign exception."""


def refuse_torchrun() -> None:
    """Refuse to start ranks in a rank that torchrun has started."""
    if "RANK" in os.environ:
        message = "--nproc: torchrun has started the ranks already"
        raise UsageError("ranks.started_twice", message, hint="leave one of them out")


def spawn_ranks(nproc: int, target: Callable[..., Any], args: Sequence[Any] = ()) -> Any:
    """Run `target(*args)` in `nproc` new processes and return what rank 0 returned.

    `target` and `args` must be picklable; the target opens `process_group(...)` itself. Every rank first loads the
    plugins that this process has loaded. This process passes SIGTERM and SIGINT on to every rank and, when the ranks
    have ended, raises SystemExit(143) or KeyboardInterrupt.

    Raises:
        UsageError: torchrun has started this process.
        LmkitError: the error of the first rank that failed, of lost contact only if there is no other.
        RankFailed: that rank was killed, exited with a code, or raised something else (its traceback is on stderr).
    """
    refuse_torchrun()
    with hosted_store() as environment:
        environment["WORLD_SIZE"] = str(nproc)
        ranks = [_Rank(number, environment, target, args) for number in range(nproc)]
        with _signals_passed_on(ranks) as received:
            try:
                for rank in ranks:
                    if not received:
                        rank.start()
                        for number in received:  # it came meanwhile
                            rank.signal(number)
                _wait_for_all(ranks, received)
            finally:
                _end(ranks)
    error = _first_failure(ranks, received)
    if error is not None:
        raise error
    if received:
        raise KeyboardInterrupt if received[0] == signal.SIGINT else SystemExit(128 + received[0])
    return ranks[0].result


class _Rank:
    """The parent's view of one rank."""

    def __init__(
        self, number: int, environment: dict[str, str], target: Callable[..., Any], args: Sequence[Any]
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.number = number
        self.result: Any = None
        self.error: LmkitError | None = None
        self.ended_by_us = False
        self._reports, self._child_end = context.Pipe(duplex=False)
        self._listening = True
        environment = {**environment, "RANK": str(number), "LOCAL_RANK": str(number)}
        self.process = context.Process(
            target=_run_rank,
            # Unpickled in this order: the target may be defined in a plugin.
            args=(_Plugins(), environment, self._child_end, target, args),
            name=f"rank {number}",
        )

    def start(self) -> None:
        # Blocked signals are inherited: a Ctrl-C while the child starts must not kill it half-way, with a traceback.
        resource_tracker.ensure_running()  # it unblocks signals, so it comes before the next line
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        self._child_end.close()  # so that a dead child shows as the end of the pipe

    @property
    def running(self) -> bool:
        return self.process.pid is not None and self.process.is_alive()

    @property
    def waitables(self) -> list[Any]:
        """What to wait for: the report while it may come (the pipe outlives the child), then the end."""
        if self.process.pid is None:
            return []
        if self._listening:
            return [self._reports]
        return [self.process.sentinel] if self.running else []

    def signal(self, number: int) -> None:
        if self.running and self.process.pid is not None:
            os.kill(self.process.pid, number)

    def receive(self) -> None:
        """Take the rank's report if it has arrived."""
        if not self._listening or not self._reports.poll():
            return
        self._listening = False
        try:
            self.result, self.error, text = self._reports.recv()
        except EOFError:
            self.process.join(GRACE_S)  # its exit code follows the end of the pipe at once
            return
        if text:
            sys.stderr.write(f"rank {self.number}:\n{text}")

    def failed(self, received: Sequence[int]) -> bool:
        """Return whether it ended badly. After a stopping signal, ending by that signal is no failure."""
        fine = {None, 0, *(_STOPPED if received else ())}
        return self.error is not None or self.process.exitcode not in fine

    def as_error(self) -> LmkitError:
        """Return the failure with the rank's name in front of the message."""
        if self.error is not None:
            message = self.error.message
            named = message if message.startswith("rank ") else f"rank {self.number}: {message}"
            return type(self.error)(self.error.code, named, hint=self.error.hint)
        code = self.process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        hint = "look above for what that rank wrote"
        return RankFailed("parallel.rank_failed", f"rank {self.number} {how}", hint=hint)


class _Plugins:
    """Load this process's plugins where it is unpickled."""

    def __reduce__(self) -> tuple:
        return _load_plugins, (list(PLUGINS),)


def _load_plugins(paths: Sequence[Path]) -> None:
    for path in paths:
        load_plugin(path)


def _run_rank(
    plugins: None,
    environment: dict[str, str],
    reports: Connection,
    target: Callable[..., Any],
    args: Sequence[Any],
) -> None:
    """Run the target in the child, in a process group of its own (Ctrl-C reaches the parent only), and report."""
    secure_streams()
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_parent, name="lmkit-parent-watch", daemon=True).start()
    os.environ.update(environment)
    # SIGINT ends a rank that sets no handler. KeyboardInterrupt would not reach a rank that waits in C++, and in the
    # middle of an import it would turn into other errors.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # a SIGINT during the start arrives here
    result: Any = None
    error: LmkitError | None = None
    text, code = "", 0
    try:
        result = target(*args)
    except LmkitError as caught:
        error, code = caught, caught.exit_code
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) and stop.code else 1
        if not stop.code:  # of a plugin, say: without an error, the parent would take the work for done
            hint = "look for sys.exit in the code of plugins"
            error = RankFailed("parallel.rank_failed", "ended before its work was done", hint=hint)
    except KeyboardInterrupt:
        code = 130
    except BaseException as caught:  # noqa: BLE001 (the border of a process: the traceback travels to the parent as text)
        error, code = system_error(caught), 1
        if error is None:
            error = plugin_error(caught) or RankFailed("parallel.rank_failed", first_line(caught))
            error.hint = "look above for its traceback"
            text = traceback.format_exc()
    reports.send((result if environment["RANK"] == "0" else None, error, text))
    shutdown(code)


def _end_with_parent() -> None:
    """End this rank when its parent was killed and could not end it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextmanager
def _signals_passed_on(ranks: Sequence[_Rank]) -> Iterator[list[int]]:
    """Pass SIGTERM and SIGINT on to every running rank; yield the list of what was received."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # only the main thread may handle signals; its handler is not ours to replace
        return

    def pass_on(number: int, frame: object) -> None:
        received.append(number)
        for rank in ranks:
            rank.signal(number)

    previous = {number: signal.signal(number, pass_on) for number in _STOPPING}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _wait_for_all(ranks: Sequence[_Rank], received: Sequence[int]) -> None:
    """Wait until all ranks have ended, but at most GRACE_S after the first failure or a second stopping signal."""
    deadline: float | None = None
    while waiting := [item for rank in ranks for item in rank.waitables]:
        left = _POLL_S if deadline is None else min(_POLL_S, deadline - time.monotonic())
        if left <= 0:
            return
        wait(waiting, left)
        for rank in ranks:
            rank.receive()
        if deadline is None and any(rank.failed(received) for rank in ranks):
            deadline = time.monotonic() + GRACE_S
        if len(received) > 1:  # the ranks leave at once, unless they cannot
            deadline = min(deadline or math.inf, time.monotonic() + GRACE_S)


def _end(ranks: Sequence[_Rank]) -> None:
    """End what still runs: SIGTERM, then SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        running = [rank for rank in ranks if rank.running]
        deadline = time.monotonic() + GRACE_S
        for rank in running:
            rank.ended_by_us = True
            rank.signal(number)
        for rank in running:
            rank.process.join(max(0.0, deadline - time.monotonic()))


def _first_failure(ranks: Sequence[_Rank], received: Sequence[int]) -> LmkitError | None:
    """Return the error that caused the others: lost contact is only a consequence."""
    failed = [rank for rank in ranks if rank.failed(received)]
    errors = [rank.as_error() for rank in failed if rank.error is not None or not rank.ended_by_us]
    reasons = [error for error in errors if not isinstance(error, RankLost)]
    stopped = [rank for rank in ranks if rank.process.exitcode in _STOPPED and not rank.ended_by_us]
    if not reasons and received and stopped:
        return None
    return next(iter(reasons or errors), None)


@contextmanager
def relayed(progress: Progress) -> Iterator[Progress]:
    """Yield a `Progress` for the arguments of `spawn_ranks`: a thread passes on to `progress` what the ranks, which
    end inside the block, report."""
    receiving, sending = multiprocessing.get_context("spawn").Pipe(duplex=False)

    def pass_on() -> None:
        while True:
            try:
                report = receiving.recv()
            except (EOFError, OSError):  # OSError: the rank was killed in the middle of a report
                return
            progress(*report)

    with receiving:
        thread = threading.Thread(target=pass_on, name="lmkit-progress", daemon=True)
        thread.start()
        try:
            yield partial(_send, sending)
        finally:
            sending.close()  # the last one: the thread finds the end of the pipe
            thread.join()


def _send(pipe: Connection, stage: str, done: int, total: int, /) -> None:
    pipe.send((stage, done, total))
