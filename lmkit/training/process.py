"""Set up the process of a run: ranks, seed, threads, deterministic kernels, signals."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from lmkit.errors import UsageError
from lmkit.measure.environment import usable_cpus
from lmkit.measure.memory import expand_segments
from lmkit.parallel.ranks import Ranks, local_device, process_group
from lmkit.recipe.recipe import Recipe
from lmkit.recipe.tables import RunConfig

_DETERMINISTIC: Any = torch.utils.deterministic  # its settings are properties, unknown to type checkers
_ONE_AT_A_TIME = threading.RLock()
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_MALLOC = {  # option of glibc's mallopt -> (its number in malloc.h, bytes, the environment variable for it)
    "M_TRIM_THRESHOLD": (-1, 1 << 30, "MALLOC_TRIM_THRESHOLD_"),
    "M_TOP_PAD": (-2, 1 << 26, "MALLOC_TOP_PAD_"),
    "M_MMAP_THRESHOLD": (-3, 1 << 30, "MALLOC_MMAP_THRESHOLD_"),
}


@contextmanager
def ranks_of(recipe: Recipe) -> Iterator[Ranks]:
    """Join the ranks with the device of [run], the backend and the timeout of [parallel].

    Training on GPUs gets expandable segments.
    """
    table, device = recipe.parallel, recipe.run.device
    if table.backend == "nccl" and local_device(device, local_rank=0).type != "cuda":
        message = 'parallel.backend: "nccl" works between GPUs, and the device is a CPU'
        raise UsageError("ranks.backend", message, hint='leave it at "auto"')
    # On GPUs the group's own choice is NCCL, with gloo for CPU tensors.
    backend = None if table.backend in ("auto", "nccl") else table.backend
    with process_group(device, backend=backend, timeout_s=table.timeout_s) as ranks:
        if recipe.train is not None and ranks.device.type == "cuda":
            expand_segments()
        yield ranks


@contextmanager
def numerics(config: RunConfig, ranks: Ranks) -> Iterator[None]:
    """Seed torch and set threads and determinism as the recipe says, float32 as the default dtype, and record
    gradients. Restore all of them afterwards, the generators of the CPU and of this rank's device, too.

    UsageError: another thread is inside ("run.one_at_a_time"): both would draw from PyTorch's default generator.

    Several ranks on CPUs without `run.threads` share the CPUs evenly; torch would give all CPUs to every rank.
    On a CPU, the process keeps the memory of freed tensors of up to 1 GiB each, until it ends: by default glibc gives
    large blocks back to the system, which maps and clears thousands of pages in every step. Environment variables
    (`MALLOC_TRIM_THRESHOLD_`, ...) take precedence.
    """
    if not _ONE_AT_A_TIME.acquire(blocking=False):
        message = "another training, evaluation or bench runs in this process"
        raise UsageError("run.one_at_a_time", message, hint="start one after the other, or in processes")
    if ranks.device.type == "cpu" and sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have no such setting
        for number, size, variable in _MALLOC.values():
            if mallopt is not None and variable not in os.environ:
                mallopt(number, size)
    threads, deterministic = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    fill, dtype = _DETERMINISTIC.fill_uninitialized_memory, torch.get_default_dtype()
    if config.threads:
        torch.set_num_threads(config.threads)
    elif ranks.world_size > 1 and ranks.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cpus() // ranks.world_size))
    if config.deterministic:
        if ranks.device.type == "cuda":
            # cuBLAS is repeatable only with a fixed workspace; it reads this when it makes its first handle.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # Filling would only cost time: nothing reads uninitialised memory.
        _DETERMINISTIC.fill_uninitialized_memory = False
    devices = [ranks.device] if ranks.device.type == "cuda" and torch.cuda.is_available() else []
    try:
        torch.set_default_dtype(torch.float32)
        with torch.random.fork_rng(devices), torch.inference_mode(False), torch.enable_grad():
            torch.default_generator.manual_seed(config.seed)  # torch.manual_seed seeds other devices, too
            for device in devices:
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(config.seed)
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        if config.deterministic:  # the call imports torch._inductor
            torch.set_deterministic_debug_mode(deterministic)
        _DETERMINISTIC.fill_uninitialized_memory = fill
        _ONE_AT_A_TIME.release()


@contextmanager
def stop_signals(ranks: Ranks) -> Iterator[Sequence[int]]:
    """Record the first SIGTERM or SIGINT and say what it does; end the process at the second.

    Yields the signals that came, empty before the first.

    A thread counts the signals, because no Python handler runs while the main thread waits in C++ for a hanging rank
    or GPU. A process that ends like this does not clean up: partial files have partial names, and the next start
    removes them. Outside of the main thread, where Python handles no signals, none is recorded.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    handlers = {number: signal.signal(number, note) for number in _SIGNALS}
    reading, bell = os.pipe()
    os.set_blocking(bell, False)
    bell_before = signal.set_wakeup_fd(bell, warn_on_full_buffer=False)
    counting = threading.Thread(
        target=_leave_at_the_second, args=(reading, ranks.is_first), name="lmkit-signals", daemon=True
    )
    counting.start()
    try:
        yield received
    finally:
        signal.set_wakeup_fd(bell_before)
        os.close(bell)  # ends the thread
        counting.join()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _leave_at_the_second(reading: int, speaks: bool) -> None:
    """Say what the first stopping signal does; end the process at the second.

    The interpreter's own C handler writes each signal as a byte to the pipe, whatever the main thread does.
    """
    is_first = True
    with open(reading, "rb", buffering=0) as bell:
        while byte := bell.read(1):
            if byte[0] not in _SIGNALS:
                continue
            if not is_first:
                os._exit(128 + byte[0])
            is_first = False
            again = "Ctrl-C again" if byte[0] == signal.SIGINT else "a second signal"
            text = f"stopping after this step; {again} aborts without saving"
            how = {"file": sys.stderr, "flush": True}
            if speaks:  # in a thread of its own: stderr may be a pipe that nobody reads
                threading.Thread(target=print, args=(text,), kwargs=how, daemon=True).start()


def end_as_stopped(received: Sequence[int]) -> None:
    """Raise KeyboardInterrupt (exit code 130) after SIGINT, else SystemExit(143)."""
    if received and received[0] == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + signal.SIGTERM)
