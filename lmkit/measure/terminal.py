"""What a stream can show."""

from __future__ import annotations

import os
from typing import IO


def wants_plain_text(stream: IO[str]) -> bool:
    """Whether no escape codes may be written: not a terminal, a dumb one, or NO_COLOR is set (no-color.org)."""
    return not stream.isatty() or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
