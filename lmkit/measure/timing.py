"""THE one way to time. Every bench and every number in a report comes through `time_variants`.

Variants of one case are measured in interleaved rounds (one sample of each per round, in an order that changes
from round to round), so that drift of clocks, temperature and neighbours falls on all of them alike, and round i
of one variant pairs with round i of another (`measure.statistics.paired_ratio`). Raw samples are kept.

Two clocks:

- "device": time on the device alone. On a GPU two CUDA events enclose the calls, and a sleeping kernel in front of
  them holds the stream until the host has queued everything: launch overhead is hidden as long as the calls do
  not synchronise. For kernels.
- "wall": what a user waits for, host dispatch included: `perf_counter` between two synchronisations. For steps.

On a CPU both are `perf_counter`.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from lmkit.measure.statistics import PairedRatio, Spread, median, paired_ratio, spread

if TYPE_CHECKING:
    import torch

Work = Callable[[], object]
ClockKind = Literal["device", "wall"]

MAX_CALLS_PER_SAMPLE = 10_000
CPU_FLUSH_BYTES = 64 * 2**20  # larger than the last-level cache share of most hosts
GPU_FLUSH_BYTES = 256 * 2**20  # 2x the largest L2 today (B200: 126 MB)


@dataclass(frozen=True)
class Timing:
    """The samples of one variant, in ms per call.

    Attributes:
        samples_ms: one entry per round, in the order of the rounds.
        clock: which clock, in words: "cuda events", "perf_counter", or a test's own.
        cache: "warm" (the same buffers call after call) or "cold" (caches overwritten before every sample).
        calls_per_sample: how many calls each sample averages over.
    """

    name: str
    samples_ms: tuple[float, ...]
    clock: str
    cache: str
    calls_per_sample: int

    @property
    def median_ms(self) -> float:
        return median(self.samples_ms)

    @property
    def spread(self) -> Spread:
        return spread(self.samples_ms)

    def versus(self, baseline: Timing, *, confidence: float = 0.95) -> PairedRatio:
        """Paired comparison with a variant of the same `time_variants` call; above 1 this one is faster."""
        return paired_ratio(self.samples_ms, baseline.samples_ms, confidence=confidence)


class Clock(Protocol):
    """Measures `calls` back-to-back calls."""

    name: str

    def sample_ms(self, work: Work, calls: int, *, flush: Work | None) -> float:
        """Milliseconds for all `calls` together; `flush` (if any) runs before them, untimed."""
        ...


class WallClock:
    """`perf_counter` between two synchronisations.

    Args:
        now: seconds, monotonic. Tests pass a fake.
        synchronize: waits for the device; nothing to wait for on a CPU.
    """

    name = "perf_counter"

    def __init__(
        self, *, now: Callable[[], float] = time.perf_counter, synchronize: Work | None = None
    ) -> None:
        self._now = now
        self._synchronize = synchronize or (lambda: None)

    def sample_ms(self, work: Work, calls: int, *, flush: Work | None) -> float:
        if flush is not None:
            flush()
        self._synchronize()
        start = self._now()
        for _ in range(calls):
            work()
        self._synchronize()
        return (self._now() - start) * 1e3


class CudaEventClock:
    """CUDA events around calls that were all queued before the first of them could start."""

    name = "cuda events"
    _LONGEST_HOLD_MS = 50.0

    def __init__(self, device: torch.device) -> None:
        import torch

        self._torch = torch
        self._device = device
        self._cycles_per_ms = self._measure_cycles_per_ms()

    def _measure_cycles_per_ms(self) -> float:
        cycles = 2_000_000
        self._torch.cuda._sleep(cycles)
        return cycles / self._elapsed_ms(lambda: self._torch.cuda._sleep(cycles))

    def _elapsed_ms(self, work: Work) -> float:
        cuda = self._torch.cuda
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        cuda.synchronize(self._device)
        return start.elapsed_time(end)

    def sample_ms(self, work: Work, calls: int, *, flush: Work | None) -> float:
        cuda = self._torch.cuda
        with cuda.device(self._device):
            cuda.synchronize(self._device)
            began = time.perf_counter()
            work()  # also brings the clocks up; its host time tells how long to hold the stream
            dispatch_ms = (time.perf_counter() - began) * 1e3
            if flush is not None:
                flush()
            hold_ms = min(1.5 * dispatch_ms * calls + 0.05, self._LONGEST_HOLD_MS)
            cuda._sleep(int(hold_ms * self._cycles_per_ms))

            def all_calls() -> None:
                for _ in range(calls):
                    work()

            return self._elapsed_ms(all_calls)


def clock_for(device: torch.device | str, kind: ClockKind) -> Clock:
    """The clock that `time_variants` uses on `device`."""
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        if kind == "device":
            return CudaEventClock(device)
        return WallClock(synchronize=lambda: torch.cuda.synchronize(device))
    return WallClock()


def time_variants(
    variants: Mapping[str, Work],
    *,
    device: torch.device | str = "cpu",
    repeats: int = 20,
    warmup: int = 3,
    kind: ClockKind = "device",
    cold_cache: bool = False,
    min_sample_ms: float = 0.0,
    max_seconds: float = math.inf,
    seed: int = 0,
    clock: Clock | None = None,
) -> dict[str, Timing]:
    """Measure every variant `repeats` times, interleaved.

    Args:
        variants: name -> a call without arguments; what it returns is dropped.
        repeats: rounds, each with one sample of every variant.
        warmup: untimed calls of each variant before the first round (compilation, autotuning, allocator).
        cold_cache: overwrite the caches before every sample; each sample is then a single call.
        min_sample_ms: calls are repeated within a sample until it takes about this long (warm cache only): what a
            5 us kernel or a 100 ns function needs on a clock that is not finer.
        max_seconds: no further round starts after this many seconds of rounds; at least one is made. Whole rounds
            only, so that samples stay paired.
        seed: of the order of the variants within each round.
        clock: overrides `kind` (tests).

    Returns:
        name -> Timing, in the order of `variants`, all with the same number of samples.

    Raises:
        ValueError: no variants, or `repeats` < 1.
        Whatever a variant raises (out of memory, say): the caller decides what that means.
    """
    if not variants:
        raise ValueError("nothing to time: no variants")
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, not {repeats}")
    clock = clock or clock_for(device, kind)
    flush = cache_flusher(device) if cold_cache else None
    calls: dict[str, int] = {}
    for name, work in variants.items():
        for _ in range(warmup):
            work()
        calls[name] = 1 if cold_cache else _calls_per_sample(clock, work, min_sample_ms)

    order = list(variants)
    shuffle = random.Random(seed).shuffle
    samples: dict[str, list[float]] = {name: [] for name in variants}
    deadline = time.monotonic() + max_seconds
    for _ in range(repeats):
        shuffle(order)
        for name in order:
            elapsed = clock.sample_ms(variants[name], calls[name], flush=flush)
            samples[name].append(elapsed / calls[name])
        if time.monotonic() > deadline:
            break
    return {
        name: Timing(
            name=name,
            samples_ms=tuple(samples[name]),
            clock=clock.name,
            cache="cold" if cold_cache else "warm",
            calls_per_sample=calls[name],
        )
        for name in variants
    }


def _calls_per_sample(clock: Clock, work: Work, min_sample_ms: float) -> int:
    """How many calls make a sample of about `min_sample_ms`; doubles until the estimate can be trusted."""
    if min_sample_ms <= 0:
        return 1
    calls = 1
    while calls < MAX_CALLS_PER_SAMPLE:
        elapsed = clock.sample_ms(work, calls, flush=None)
        if elapsed >= min_sample_ms / 4:
            return max(1, min(MAX_CALLS_PER_SAMPLE, math.ceil(calls * min_sample_ms / elapsed)))
        calls *= 2
    return MAX_CALLS_PER_SAMPLE


def cache_flusher(device: torch.device | str) -> Work:
    """A call that overwrites a buffer larger than the last-level cache of `device`."""
    import torch

    device = torch.device(device)
    size = GPU_FLUSH_BYTES if device.type == "cuda" else CPU_FLUSH_BYTES
    buffer = torch.zeros(size, dtype=torch.uint8, device=device)
    return buffer.zero_
