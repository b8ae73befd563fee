"""Measure memory: of the CUDA allocator on a GPU, of processes (RSS, PSS) on a CPU. In bytes.

Also switch the expandable segments of the CUDA allocator on and off.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

GB = 10**9
GIB = 2**30


@dataclass
class PeakMemory:
    """What is in use when a `track_peak` block begins, at most, and (on a GPU) when it ends."""

    start_bytes: int = 0
    peak_bytes: int = 0
    end_bytes: int = 0

    @property
    def extra_bytes(self) -> int:
        """What the block needed on top of what was in use."""
        return max(0, self.peak_bytes - self.start_bytes)


@contextmanager
def track_peak(device: torch.device | str = "cpu") -> Iterator[PeakMemory]:
    """Yield a `PeakMemory` that holds the block's peak once the block has ended (also by an exception)."""
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    peak = PeakMemory(memory_in_use(device))
    if device.type != "cuda":
        try:
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM back to the present RSS: proc(5)
        except OSError:  # an older peak stays
            peak.start_bytes = _peak_rss()
    try:
        yield peak
    finally:
        peak.peak_bytes = peak_memory(device)
        if device.type == "cuda":
            peak.end_bytes = memory_in_use(device)


def peak_memory(device: torch.device) -> int:
    """Return the most in use at any moment so far: of the CUDA allocator on a GPU, else of the process (RSS)."""
    import torch

    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _peak_rss()


def memory_in_use(device: torch.device) -> int:
    """Return the bytes in use: of the CUDA allocator on a GPU, else of the process (RSS, or its peak)."""
    import torch

    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc only
        malloc_trim(0)  # freed memory is not in use, and what is taken from it would not show as growth
    status = Path("/proc/self/status")
    return _bytes_in(status, "VmRSS") if status.exists() else _peak_rss()


def _peak_rss() -> int:
    status = Path("/proc/self/status")
    if status.exists():
        return _bytes_in(status, "VmHWM")
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, the others KiB


def _bytes_in(path: Path, name: str) -> int:
    """Return the number of a line `Name:   123 kB` of a /proc file."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", path.read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def available_memory() -> int | None:
    """Return the bytes that the host can allocate without swapping (Linux), or None if the system does not tell."""
    info = Path("/proc/meminfo")
    return _bytes_in(info, "MemAvailable") if info.exists() else None


def release_memory(device: torch.device | str) -> None:
    """Give freed memory back: the next measurement starts from an empty pool."""
    import torch

    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def claim_workspaces(device: torch.device | str) -> None:
    """Let cuBLAS allocate the workspaces that it keeps, of this thread and of autograd's, before any measurement."""
    import torch

    if torch.device(device).type == "cuda":
        matrix = torch.ones(16, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
        (matrix @ matrix).sum().backward()


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether a GPU's memory ran out: the allocator's, or the driver's (torch, its compiler and Triton word
    that differently)."""
    import torch

    in_first_line = re.match(r".*CUDA\b.*: out of memory", str(error))
    return isinstance(error, torch.OutOfMemoryError) or in_first_line is not None


_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The environment variables from which PyTorch reads the allocator's settings."""
_EXPANDABLE = "expandable_segments:True"


def expand_segments() -> None:
    """Let segments grow and shrink, unless the environment decides about it.

    Before memory runs out, gaps between tensors are then given back page by page. Other segments are given back only
    as a whole, so their gaps stay.
    """
    name, settings = _settings()
    if "expandable_segments" in settings or "backend" in settings:
        return
    os.environ[name] = f"{settings},{_EXPANDABLE}" if settings else _EXPANDABLE
    _change(os.environ[name])


@contextmanager
def without_expandable_segments() -> Iterator[None]:
    """Switch expandable segments off inside the block: PyTorch does not support them in pools of other allocators."""
    _, settings = _settings()
    if _EXPANDABLE not in settings:
        yield
        return
    _change(settings.replace(_EXPANDABLE, "expandable_segments:False"))
    try:
        yield
    finally:
        _change(settings)


def _settings() -> tuple[str, str]:
    """Return the variable that counts, and its value without spaces."""
    name = next((name for name in _VARIABLES if name in os.environ), _VARIABLES[0])
    return name, os.environ.get(name, "").replace(" ", "")


def _change(settings: str) -> None:
    """Change the settings of this process's allocator. The function's name depends on PyTorch's version."""
    import torch

    change: Callable[[str], None] | None = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (change or torch.cuda.memory._set_allocator_settings)(settings)
