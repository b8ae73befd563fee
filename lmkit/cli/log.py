"""Print the log of library code (logger "lmkit") as plain lines on stderr.

Only commands that run import this, not help: `logging` takes 9 ms to load.
"""

from __future__ import annotations

import logging
import sys


class _Line(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return f"{record.levelname.lower()}: {text}" if record.levelno >= logging.WARNING else text


class _Stderr(logging.StreamHandler):
    """Writes to the current stderr: while a bar is drawn, lines go above it."""

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
