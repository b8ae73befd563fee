"""Name a stretch of code for a profiler. Nothing is recorded until a profiler sets `recorder`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

recorder: Callable[[str], AbstractContextManager] | None = None
"""Opens a range of this name; set by `lmkit.measure.ranges`. One for the process, as profilers are."""


def range_(name: str) -> AbstractContextManager:
    """Mark the enclosed code as `name` on the timeline of the profiler, if there is one.

    with range_("attention.scores"):
        scores = q @ k.mT
    """
    if recorder is None:
        return nullcontext()  # torch.compile traces this one; a class of our own would break the graph
    import torch  # not at the top: commands without torch import this file

    # A graph that is compiled runs later; a range would mark its tracing.
    return nullcontext() if torch.compiler.is_compiling() else recorder(name)
