"""Progress of the ranks that this process started: one of them reports it, this process draws it."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from lmkit.measure.progress import Progress


@contextmanager
def relayed(progress: Progress) -> Iterator[Progress]:
    """Yield a `Progress` that `spawn_ranks` can hand to its ranks.

    What they report is passed on to `progress` by a thread of this process, all of it by the end of the block, by
    which the ranks must have ended.
    """
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
            yield _Sender(sending)
        finally:
            sending.close()  # the last one: the thread finds the end of the pipe
            thread.join()


class _Sender:
    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def __call__(self, stage: str, done: int, total: int, /) -> None:
        self._pipe.send((stage, done, total))
