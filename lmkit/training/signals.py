"""SIGTERM and SIGINT: finish the step and save; a second one leaves at once."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """While inside the `with` block a first signal is only noted; the second ends the process immediately.

    A process that leaves like that has no time to tidy up: what it was writing has a partial name, and the next
    start removes it. Signal handlers belong to the main thread: elsewhere `with` raises ValueError.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            os._exit(128 + number)
        self.received = number


def end_as_stopped(received: int | None) -> None:
    """End as a stopped process does: KeyboardInterrupt (130) after SIGINT, SystemExit(143) otherwise.

    Otherwise includes None: another rank got the signal.
    """
    if received == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + signal.SIGTERM)
