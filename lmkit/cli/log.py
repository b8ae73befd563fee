"""Library code speaks through the logger "lmkit"; here it gets its voice: plain lines on stderr, warnings marked.

Imported by commands that run, not by those that only print help: `logging` takes 9 ms to load.
"""

from __future__ import annotations

import logging


class _Line(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return f"{record.levelname.lower()}: {text}" if record.levelno >= logging.WARNING else text


def log_to_stderr() -> None:
    """Send the log to stderr."""
    log = logging.getLogger("lmkit")
    log.setLevel(logging.INFO)
    log.propagate = False
    handler = logging.StreamHandler()
    handler.setFormatter(_Line())
    log.handlers = [handler]
