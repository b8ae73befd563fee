"""Library code speaks through the logger "lmkit"; here it gets its voice: plain lines on stderr, warnings marked.

Imported by commands that run, not by those that only print help: `logging` takes 9 ms to load.
"""

from __future__ import annotations

import logging
import sys


class _Line(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return f"{record.levelname.lower()}: {text}" if record.levelno >= logging.WARNING else text


class _Stderr(logging.StreamHandler):
    """Writes to what stderr is at that moment: while there is a bar, lines go above it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def log_to_stderr() -> None:
    """Send the log to stderr."""
    log = logging.getLogger("lmkit")
    log.setLevel(logging.INFO)
    log.propagate = False
    handler = _Stderr()
    handler.setFormatter(_Line())
    log.handlers = [handler]
