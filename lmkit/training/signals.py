"""SIGTERM and SIGINT: finish the step and save; a second one leaves at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """While inside the `with` block a first signal is only noted; the second ends the process immediately.

    Also where the main thread waits in C++ for a rank or a GPU that hangs, and no handler of Python's runs: a thread
    counts the signals. A process that leaves like that has no time to tidy up: what it was writing has a partial
    name, and the next start removes it. Handlers belong to the main thread: elsewhere `with` raises ValueError.
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
        os.close(self._bell)  # which ends the thread
        self._counting.join()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number


def _leave_at_the_second(reading: int) -> None:
    """End the process at the second stopping signal. Each signal is a byte in the pipe, which the interpreter's own
    handler writes, whatever the main thread does."""
    told = False
    with open(reading, "rb", buffering=0) as bell:
        while byte := bell.read(1):
            if byte[0] in _SIGNALS:
                if told:
                    os._exit(128 + byte[0])
                told = True


def end_as_stopped(received: int | None) -> None:
    """End as a stopped process does: KeyboardInterrupt (130) after SIGINT, SystemExit(143) otherwise.

    Otherwise includes None: another rank got the signal.
    """
    if received == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + signal.SIGTERM)
