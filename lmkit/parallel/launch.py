"""`--nproc N`: start the ranks of one machine without torchrun, and end all of them when one fails.

Every rank is a fresh interpreter (spawn: a fork after torch was loaded can deadlock) with the environment that
`process_group` reads, and meets the others in this process (`lmkit.parallel.meeting`).
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
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

from lmkit.errors import LmkitError, UsageError
from lmkit.parallel.failures import RankLost
from lmkit.parallel.leaving import leave
from lmkit.parallel.meeting import RENDEZVOUS_VARIABLE, hosted_store

GRACE_S = 3.0
"""After the first failure: how long the other ranks get to report theirs, and again to end after SIGTERM. After a
second stopping signal: how long they get to leave."""
STOP_S = 75.0
"""After a stopping signal: how long the other ranks get once one has ended. The first may upload for a minute."""

_LOOK_S = 1.0
"""A signal that the system gave to another thread of this process wakes nobody: it is seen at the next look."""
_STOPPING = (signal.SIGTERM, signal.SIGINT)
_STOPPED = tuple(code for number in _STOPPING for code in (-number, 128 + number))


class RankFailed(LmkitError):
    """A rank ended without an error that could be forwarded: a signal, an exit code, or a foreign exception."""


def spawn_ranks(nproc: int, target: Callable[..., Any], args: Sequence[Any] = ()) -> Any:
    """Run `target(*args)` in `nproc` new processes and return what rank 0 returned.

    `target` and `args` must be picklable; the target opens `process_group(...)` itself. SIGTERM and SIGINT to
    this process are passed on to every rank once each; when the ranks have then ended, SystemExit(143) or
    KeyboardInterrupt is raised here, also if some lost contact to others that were gone already.

    Raises:
        LmkitError: the error of the first rank that failed, named in the message (its type is kept, so a
            UsageError stays one). Ranks that only lost contact do not count while another has a reason.
        RankFailed: that rank was killed, exited with a code, or raised something else (its traceback is
            written to stderr).
    """
    if nproc < 1:
        raise UsageError(f"--nproc: {nproc} is not a number of ranks", hint="give 1 or more")
    with hosted_store() as address:
        ranks = [_Rank(number, nproc, address, target, tuple(args)) for number in range(nproc)]
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
        self, number: int, nproc: int, meeting: str, target: Callable[..., Any], args: tuple[Any, ...]
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.number = number
        self.result: Any = None
        self.error: LmkitError | None = None
        self.ended_by_us = False
        self._reports, self._child_end = context.Pipe(duplex=False)
        self._listening = True
        environment = {
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "WORLD_SIZE": str(nproc),
            RENDEZVOUS_VARIABLE: meeting,
        }
        self.process = context.Process(
            target=_run_rank, args=(environment, self._child_end, target, args), name=f"rank {number}"
        )

    def start(self) -> None:
        # Blocked signals are inherited: a Ctrl-C while the child starts must not kill it half-way, with a traceback.
        resource_tracker.ensure_running()  # which unblocks, so not between these lines
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
        """Take the rank's report if it is there; the end of the pipe means that none will come."""
        if not self._listening or not self._reports.poll():
            return
        self._listening = False
        try:
            kind, content = self._reports.recv()
        except EOFError:
            self.process.join(GRACE_S)  # its exit code follows the end of the pipe at once
            return
        if kind == "result":
            self.result = content
        elif kind == "error":
            self.error = content
        else:
            sys.stderr.write(f"rank {self.number}:\n{content}")
            self.error = RankFailed(content.strip().splitlines()[-1])

    def failed(self, received: Sequence[int]) -> bool:
        """Whether it ended badly; ending as stopping signals do, once one was passed on, is no failure."""
        fine = {None, 0, *(_STOPPED if received else ())}
        return self.error is not None or self.process.exitcode not in fine

    @property
    def ended_as_told(self) -> bool:
        """Whether it ended as a signal makes a process end, before anybody lost patience with it."""
        return self.process.exitcode in _STOPPED and not self.ended_by_us

    def as_error(self) -> LmkitError:
        """The failure with the rank's name in front."""
        if self.error is not None:
            message = self.error.message
            named = message if message.startswith("rank ") else f"rank {self.number}: {message}"
            return type(self.error)(named, hint=self.error.hint)
        code = self.process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return RankFailed(f"rank {self.number} {how}", hint="look above for what that rank wrote")


def _run_rank(
    environment: dict[str, str], reports: Connection, target: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """The child: own process group (Ctrl-C reaches the parent alone), then the target, then a report."""
    os.setpgid(0, 0)
    _end_with_parent()
    os.environ.update(environment)
    leave(_report_result(reports, target, args))


def _report_result(reports: Connection, target: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """Run the target, tell the parent how it went, and return the exit code."""
    # As SIGTERM does, it ends a rank that has no handler of its own, wherever that is: Python's exception would not
    # reach one that waits in C++, and in the middle of an import it turns into other errors.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # one that came during the start arrives here
    try:
        result = target(*args)
        reports.send(("result", result if os.environ["RANK"] == "0" else None))
    except LmkitError as error:
        reports.send(("error", error))
        return error.exit_code
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        return 130
    except Exception:  # noqa: BLE001 (the border of a process: the traceback travels to the parent as text)
        reports.send(("traceback", traceback.format_exc()))
        return 1
    return 0


def _end_with_parent() -> None:
    """A rank must not outlive a parent that was killed without a chance to end it."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="lmkit-parent-watch", daemon=True).start()


@contextmanager
def _signals_passed_on(ranks: Sequence[_Rank]) -> Iterator[list[int]]:
    """Pass SIGTERM and SIGINT on to every running rank; yields the list of what was received. A rank that is told
    before it has handlers of its own just ends."""
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
    """Until every rank ended, GRACE_S after the first failure or a second stopping signal, or STOP_S after the first
    end when told to stop."""
    deadline: float | None = None
    while waiting := [item for rank in ranks for item in rank.waitables]:
        left = _LOOK_S if deadline is None else min(_LOOK_S, deadline - time.monotonic())
        if left <= 0:
            return
        wait(waiting, left)
        for rank in ranks:
            rank.receive()
        if deadline is None and any(rank.failed(received) for rank in ranks):
            deadline = time.monotonic() + GRACE_S
        elif deadline is None and received and not all(rank.running for rank in ranks):
            deadline = time.monotonic() + STOP_S
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
    """The error that explains the others: a rank that lost contact saw the consequence of an error, or of a stop."""
    failed = [rank for rank in ranks if rank.failed(received)]
    errors = [rank.as_error() for rank in failed if rank.error is not None or not rank.ended_by_us]
    reasons = [error for error in errors if not isinstance(error, RankLost)]
    if not reasons and received and any(rank.ended_as_told for rank in ranks):
        return None
    return next(iter(reasons or errors), None)
