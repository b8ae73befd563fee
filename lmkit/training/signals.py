"""Stop on SIGTERM and SIGINT: the first finishes the step and saves, the second exits at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Record the first signal in `received`; end the process immediately at the second.

    A thread counts the signals, because no Python handler runs while the main thread waits in C++ for a hanging rank
    or GPU. A process that ends like this does not clean up: partial files have partial names, and the next start
    removes them. Use it as a context manager in the main thread; elsewhere `with` raises ValueError.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}
        self._bell: int | None = None
        self._bell_before = -1
        self._counting: threading.Thread | None = None

    def __enter__(self) -> StopSignals:
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        reading, self._bell = os.pipe()
        os.set_blocking(self._bell, False)
        self._bell_before = signal.set_wakeup_fd(self._bell, warn_on_full_buffer=False)
        self._counting = threading.Thread(
            target=_leave_at_the_second, args=(reading,), name="lmkit-signals", daemon=True
        )
        self._counting.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._bell is not None
        assert self._counting is not None
        signal.set_wakeup_fd(self._bell_before)
        os.close(self._bell)  # ends the thread
        self._counting.join()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number


def _leave_at_the_second(reading: int) -> None:
    """End the process at the second stopping signal.

    The interpreter's own C handler writes each signal as a byte to the pipe, whatever the main thread does.
    """
    told = False
    with open(reading, "rb", buffering=0) as bell:
        while byte := bell.read(1):
            if byte[0] in _SIGNALS:
                if told:
                    os._exit(128 + byte[0])
                told = True


def end_as_stopped(received: int | None) -> None:
    """Raise KeyboardInterrupt (exit code 130) after SIGINT, else SystemExit(143).

    Args:
        received: the signal; None if another rank received it.
    """
    if received == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + signal.SIGTERM)
