"""Measure peak memory: of the CUDA allocator on a GPU, of the process (RSS, PSS) on a CPU. In bytes."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import sys
from collections.abc import Iterator
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
    """Filled in when the `track_peak` block ends.

    Attributes:
        start_bytes: in use when the block began.
        peak_bytes: the most in use at any moment of the block.
        source: what was counted: "cuda allocator"; "peak rss" (Linux, reset at the start of the block);
            "peak rss of the process" (elsewhere: the operating system cannot reset it, so it may be older).
    """

    start_bytes: int = 0
    peak_bytes: int = 0
    source: str = ""

    @property
    def extra_bytes(self) -> int:
        """What the block needed on top of what was in use."""
        return max(0, self.peak_bytes - self.start_bytes)


@contextmanager
def track_peak(device: torch.device | str = "cpu") -> Iterator[PeakMemory]:
    """Yield a `PeakMemory` that holds the block's peak once the block has ended (also by an exception)."""
    import torch

    device = torch.device(device)
    peak = PeakMemory()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        peak.source = "cuda allocator"
        peak.start_bytes = torch.cuda.memory_allocated(device)
        try:
            yield peak
        finally:
            peak.peak_bytes = peak_memory(device)
        return
    _return_freed_pages()
    was_reset = _reset_peak_rss()
    peak.source = "peak rss" if was_reset else "peak rss of the process"
    peak.start_bytes = process_memory().rss_bytes if was_reset else _peak_rss()
    try:
        yield peak
    finally:
        peak.peak_bytes = _peak_rss()


def peak_memory(device: torch.device) -> int:
    """Return the most in use at any moment so far: of the CUDA allocator on a GPU, else of the process (RSS)."""
    import torch

    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _peak_rss()


def _return_freed_pages() -> None:
    """Let the C library give freed memory back: what the block takes from its store would not show as growth."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


def _reset_peak_rss() -> bool:
    """Set VmHWM back to the present RSS (Linux, proc(5) clear_refs); False where that is not possible."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _peak_rss() -> int:
    status = Path("/proc/self/status")
    if status.exists():
        return _kib_fields(status)["VmHWM"] * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, the others KiB


@dataclass(frozen=True)
class ProcessMemory:
    """Resident and proportional set size: PSS divides shared pages among their users, so it may be summed."""

    rss_bytes: int
    pss_bytes: int


def process_memory(pid: int | None = None) -> ProcessMemory:
    """Return the memory of one process now (this one by default).

    Where the system does not tell PSS (not Linux), both are the peak RSS of this process.

    Raises:
        ProcessLookupError: no such process (any more).
    """
    folder = Path("/proc") / (str(pid) if pid is not None else "self")
    if not Path("/proc/self/smaps_rollup").exists():
        return ProcessMemory(_peak_rss(), _peak_rss())
    try:
        fields = _kib_fields(folder / "smaps_rollup")
    except OSError as error:
        raise ProcessLookupError(f"no process {pid}") from error
    return ProcessMemory(fields["Rss"] * 1024, fields["Pss"] * 1024)


def process_tree_memory(root_pid: int | None = None) -> ProcessMemory:
    """Return the sum over a process (this one by default) and its descendants; RSS counts shared pages repeatedly."""
    root = root_pid if root_pid is not None else os.getpid()
    if not Path("/proc/self/smaps_rollup").exists():
        return process_memory()
    rss = pss = 0
    for pid in _descendants(root):
        try:
            memory = process_memory(pid)
        except ProcessLookupError:  # ended while we were counting
            continue
        rss += memory.rss_bytes
        pss += memory.pss_bytes
    return ProcessMemory(rss, pss)


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            status = (folder / "stat").read_text()
        except OSError:
            continue
        parent = int(status.rpartition(")")[2].split()[1])  # the name in parentheses may hold spaces
        children.setdefault(parent, []).append(int(folder.name))
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting += children.get(pid, [])
    return found


def _kib_fields(path: Path) -> dict[str, int]:
    """Return the `Name:   123 kB` lines of a /proc file as {name: 123}."""
    fields = {}
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            fields[name] = int(value.split()[0])
    return fields


def release_memory(device: torch.device | str) -> None:
    """Give freed memory back: the next measurement starts from an empty pool."""
    import torch

    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def claim_workspaces(device: torch.device | str) -> None:
    """Let cuBLAS allocate what it keeps to the end: 32 MiB on an H200 for every thread that multiplies, and the
    backward pass has a thread of its own. Or the first training that is measured pays for all."""
    import torch

    if torch.device(device).type == "cuda":
        matrix = torch.ones(16, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
        (matrix @ matrix).sum().backward()


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether memory ran out: the allocator's, or the driver's, which needs some for every kernel that it
    loads (torch, its compiler and Triton word that differently)."""
    import torch

    return isinstance(error, torch.OutOfMemoryError) or bool(
        re.search(r"CUDA\b.*: out of memory", str(error).partition("\n")[0])
    )


def available_memory() -> int | None:
    """Return the bytes that the host can allocate without swapping (Linux), or None if the system does not tell."""
    info = Path("/proc/meminfo")
    return _kib_fields(info)["MemAvailable"] * 1024 if info.exists() else None
