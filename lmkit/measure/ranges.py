"""Switch on the named ranges of `lmkit.core.ranges` on a profiler's timeline, for the whole process: in the process
that is profiled, or by the environment variable `LMKIT_RANGES` of commands that a profiler starts."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from lmkit.core import ranges
from lmkit.errors import UsageError

if TYPE_CHECKING:
    import torch

ENVIRONMENT_VARIABLE = "LMKIT_RANGES"


def enable_ranges(kind: Literal["nvtx", "kineto"]) -> None:
    """Let `range_` record from now on: NVTX ranges (Nsight Systems) or torch.profiler's (kineto)."""
    import torch

    if kind == "kineto":
        ranges.recorder = torch.profiler.record_function
        return
    if not nvtx_is_available():
        message = "NVTX ranges need a CUDA build of torch or the nvtx package"
        hint = "pip install 'nvtx==0.2.10', or profile a recipe without it: lmkit profile kineto RECIPE"
        raise UsageError("profile.no_nvtx", message, hint=hint)
    if torch.version.cuda is not None:
        push, pop = torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop
    else:
        import nvtx

        push, pop = nvtx.push_range, nvtx.pop_range
    observe_ranges(lambda name, opens: push(name) if opens else pop())


def observe_ranges(observer: Callable[[str, bool], object]) -> None:
    """Let every range call `observer(name, True)` when it opens and `observer(name, False)` when it closes."""

    @contextmanager
    def open_range(name: str) -> Iterator[None]:
        observer(name, True)
        try:
            yield
        finally:
            observer(name, False)

    ranges.recorder = open_range


def disable_ranges() -> None:
    """Let `range_` do nothing again."""
    ranges.recorder = None


def enable_ranges_from_environment() -> None:
    """Enable the ranges that LMKIT_RANGES (nvtx or kineto) asks for; call it where a profiled process starts."""
    kind = os.environ.get(ENVIRONMENT_VARIABLE)
    if kind in ("nvtx", "kineto"):
        enable_ranges(kind)  # type: ignore[arg-type]
    elif kind:
        message = f"{ENVIRONMENT_VARIABLE}={kind}: not a kind of range"
        raise UsageError("profile.unknown_ranges", message, hint="use nvtx or kineto, or unset it")


def nvtx_is_available() -> bool:
    """Whether NVTX ranges can be marked: torch.cuda.nvtx raises on a CPU build of torch, where `nvtx` stands in."""
    import torch

    return torch.version.cuda is not None or importlib.util.find_spec("nvtx") is not None


@contextmanager
def quietly(profiler: torch.profiler.profile) -> Iterator[torch.profiler.profile]:
    """Run the block under a profiler, and drop what PyTorch writes to stderr when it starts and stops one."""
    with _silence():
        profiler.__enter__()
    try:
        yield profiler
    finally:
        with _silence():
            profiler.__exit__(None, None, None)


@contextmanager
def _silence() -> Iterator[None]:
    stderr = os.dup(2)
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
