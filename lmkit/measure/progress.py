"""Report the progress of long work, and say what a stream can show of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import IO

Progress = Callable[[str, int, int], None]
"""Called with the name of a stage, how much of it is done, and how much there is (bytes, steps, cases)."""


def wants_plain_text(stream: IO[str]) -> bool:
    """Whether no escape codes may be written: not a terminal, a dumb one, or NO_COLOR is set (no-color.org)."""
    return not stream.isatty() or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
