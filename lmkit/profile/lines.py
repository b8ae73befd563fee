"""Find the source line that an allocation is due to: the innermost line of lmkit, or of a user's own code, on the
stack."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

AUTOGRAD = "autograd"
"""The line of what PyTorch's own backward operations allocate, in threads without a Python stack."""
_PACKAGE = Path(__file__).resolve().parent.parent
_PASSED_OVER = tuple(f"{_PACKAGE / part}" for part in ("profile", "measure", "autograd.py"))
_LIBRARIES = (os.path.dirname(os.__file__), os.path.dirname(os.path.dirname(torch.__file__)), "<", "?")

Place = tuple[str, int]
"""A file and a line number."""


def line_of(stack: Iterable[Place]) -> str:
    """Return `core/model.py:130  the code` of the innermost line that counts; `AUTOGRAD` without one.

    Args:
        stack: innermost first.
    """
    for file, number in stack:
        ours = file.startswith(f"{_PACKAGE}{os.sep}")
        if not file or file.startswith(_PASSED_OVER) or (not ours and file.startswith(_LIBRARIES)):
            continue
        name = os.path.relpath(file, _PACKAGE) if ours else os.path.basename(file)
        return f"{name}:{number}  {linecache.getline(file, number).strip()[:60]}".rstrip()
    return AUTOGRAD


class Lines(TorchDispatchMode):
    """Note the line of every operation, under a number by which it is annotated in a trace of torch.profiler.

    Attributes:
        found: the lines, by number.
    """

    PREFIX = "line "

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._numbers: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        line = line_of(_stack())
        number = self._numbers.setdefault(line, len(self.found))
        if number == len(self.found):
            self.found.append(line)
        with torch.profiler.record_function(f"{self.PREFIX}{number}"):
            return func(*args, **(kwargs or {}))


def _stack() -> Iterator[Place]:
    """Yield the caller's stack, innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
