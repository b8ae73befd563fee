"""Step times of a training loop in its steady state, on every rank."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from lmkit.measure.timing import Work
from lmkit.parallel.ranks import Ranks


class SteadyStateClock:
    """Times `steps` steps that follow half as many (rounded up) untimed ones without a pause between them.

    The untimed steps leave behind what a loop's previous step does (weights still being gathered, a host that
    runs ahead of the GPU), and the last timed one takes along as much: nothing is counted twice or left out. They are
    several because a host that is hardly faster than the GPU needs several to get ahead, and until then any
    interruption of it lengthens the step.
    On GPUs the times are of CUDA events in the stream, on CPUs of `perf_counter`.

    Attributes:
        ahead_ms: of every sample on a GPU, how long it still worked when the host had handed over the last step. What
            is near zero measured the host: interruptions of it, and what its caches and clocks do, were not hidden.
    """

    def __init__(self, device: torch.device, steps: int) -> None:
        self.name = (
            f"{'cuda events' if device.type == 'cuda' else 'perf_counter'}, steady state of {steps} steps"
        )
        self.ahead_ms: list[float] = []
        self._device = device
        self._steps = steps

    def sample_ms(self, work: Work, calls: int, *, before: Sequence[Work]) -> float:
        """Milliseconds per step, times `calls` (which says how many steps its caller believes it asked for)."""
        for preparation in before:
            preparation()
        for _ in range(math.ceil(self._steps / 2)):
            work()
        return calls * (self._on_gpu(work) if self._device.type == "cuda" else self._on_cpu(work))

    def _on_gpu(self, work: Work) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(self._steps):
            work()
        end.record()
        handed_over = time.perf_counter()
        torch.cuda.synchronize(self._device)
        self.ahead_ms.append((time.perf_counter() - handed_over) * 1e3)
        return start.elapsed_time(end) / self._steps

    def _on_cpu(self, work: Work) -> float:
        start = time.perf_counter()
        for _ in range(self._steps):
            work()
        return (time.perf_counter() - start) * 1e3 / self._steps


def of_slowest_rank(samples_ms: Sequence[float], ranks: Ranks) -> list[float]:
    """Round by round the longest of all ranks' samples (as many on each). Collective; the same on every rank."""
    slowest = torch.tensor(samples_ms, dtype=torch.float64)
    if ranks.world_size > 1:
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist()


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Python's collector off: with a dozen models alive one of its pauses is longer than what is compared. Afterwards
    it is on again if it was before."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
