"""torch.profiler without the two lines that it writes to a terminal."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MARK = b"USDT:"
"""How PyTorch 2.13's lines `profiler_start` and `profiler_stop` begin. Its own switch (KINETO_LOG_LEVEL) counts
them as worse than errors, and would hide those first."""
_STDERR = 2


@contextmanager
def quietly(profiler: torch.profiler.profile) -> Iterator[torch.profiler.profile]:
    """`with profiler`, but stderr has no such lines; whatever else is written there, by anyone, is passed on."""
    with _without_marks():
        profiler.__enter__()
    try:
        yield profiler
    finally:
        with _without_marks():
            profiler.__exit__(None, None, None)


@contextmanager
def _without_marks() -> Iterator[None]:
    """What is written to stderr meanwhile, by C++ too, comes at the end of the block, without the marks."""
    try:
        stderr = os.dup(_STDERR)
    except OSError:  # closed: nobody sees it
        yield
        return
    if sys.stderr is not None:
        sys.stderr.flush()
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), _STDERR)
        try:
            yield
        finally:
            if sys.stderr is not None:
                sys.stderr.flush()
            os.dup2(stderr, _STDERR)
            said.seek(0)
            with open(stderr, "wb") as terminal:
                terminal.writelines(line for line in said if not line.startswith(_MARK))
