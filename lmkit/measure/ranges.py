"""Named ranges on a profiler's timeline; free when nobody profiles.

    with range_("attention.scores"):
        scores = q @ k.mT

Off (the default) `range_` is one comparison and an empty context manager, some 0.2 us. It is switched on by
`enable_ranges` (in the process that is being profiled) or, for commands that a profiler starts, by the environment
variable `LMKIT_RANGES` and `enable_ranges_from_environment`. The switch is process-wide, as profilers are.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Literal

from lmkit.errors import UsageError

if TYPE_CHECKING:
    import torch

RangeKind = Literal["nvtx", "kineto"]
ENVIRONMENT_VARIABLE = "LMKIT_RANGES"


_open_range: Callable[[str], AbstractContextManager] | None = None


def range_(name: str) -> AbstractContextManager:
    """Mark the enclosed code as `name` on the timeline of the profiler, if one was announced."""
    if _open_range is None:
        return nullcontext()  # torch.compile traces this one; a class of our own would break the graph
    return _open_range(name)


def nvtx_is_available() -> bool:
    """Whether NVTX ranges can be marked: torch.cuda.nvtx raises on a CPU build of torch, where `nvtx` stands in."""
    import torch

    return torch.version.cuda is not None or importlib.util.find_spec("nvtx") is not None


def enable_ranges(kind: RangeKind) -> None:
    """Let `range_` record from now on: NVTX ranges (Nsight Systems) or torch.profiler's (kineto).

    Raises:
        UsageError: NVTX is wanted, but this torch is a CPU build and the `nvtx` package is not installed.
    """
    global _open_range
    _open_range = _nvtx_opener() if kind == "nvtx" else _kineto_opener()


def observe_ranges(observer: Callable[[str, bool], None]) -> None:
    """Let every range call `observer(name, True)` when it opens and `observer(name, False)` when it closes."""
    global _open_range

    @contextmanager
    def open_range(name: str) -> Iterator[None]:
        observer(name, True)
        try:
            yield
        finally:
            observer(name, False)

    def open_unless_compiling(name: str) -> AbstractContextManager:
        import torch

        return nullcontext() if torch.compiler.is_compiling() else open_range(name)

    _open_range = open_unless_compiling


def disable_ranges() -> None:
    """Back to doing nothing."""
    global _open_range
    _open_range = None


def enable_ranges_from_environment() -> None:
    """Call once at the start of a process that may be profiled: obeys LMKIT_RANGES=nvtx or kineto.

    Raises:
        UsageError: the variable holds anything else.
    """
    kind = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if kind == "nvtx":
        enable_ranges("nvtx")
    elif kind == "kineto":
        enable_ranges("kineto")
    elif kind:
        raise UsageError(
            "profile.unknown_ranges",
            f"{ENVIRONMENT_VARIABLE}={kind}: not a kind of range",
            hint="use nvtx or kineto, or unset it",
        )


def _kineto_opener() -> Callable[[str], AbstractContextManager]:
    import torch

    def open_range(name: str) -> AbstractContextManager:
        # A graph being compiled runs later; a range around its tracing would mark the wrong thing.
        return nullcontext() if torch.compiler.is_compiling() else torch.profiler.record_function(name)

    return open_range


def _nvtx_opener() -> Callable[[str], AbstractContextManager]:
    import torch

    if not nvtx_is_available():
        raise UsageError(
            "profile.no_nvtx",
            "NVTX ranges need a CUDA build of torch or the nvtx package",
            hint="pip install 'nvtx==0.2.10', or profile a recipe without it: lmkit profile kineto RECIPE",
        )
    if torch.version.cuda is not None:
        push, pop = torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop
    else:
        import nvtx

        push, pop = nvtx.push_range, nvtx.pop_range

    class NvtxRange:
        def __init__(self, name: str) -> None:
            self._name = name

        def __enter__(self) -> None:
            push(self._name)

        def __exit__(self, *exc: object) -> None:
            pop()

    def open_range(name: str) -> AbstractContextManager:
        return nullcontext() if torch.compiler.is_compiling() else NvtxRange(name)

    return open_range


_NO_DEVICE = b"gpuGetDeviceCount failed"  # a CUDA build of torch where there is no GPU
_MARK = b"USDT:"
"""The start of the lines that PyTorch 2.13 writes when a profiler starts and stops. Its own switch (KINETO_LOG_LEVEL)
counts them as worse than errors, and would hide those first."""
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
    """Hold back what is written to stderr, by C++ too, and write it at the end of the block without the marks."""
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
                terminal.writelines(
                    line for line in said if not (line.startswith(_MARK) or _NO_DEVICE in line)
                )
