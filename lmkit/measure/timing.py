"""Time variants in interleaved rounds: `time_variants`.

Every round takes one sample of each variant, in an order that changes from round to round, so that drift of clocks,
temperature and neighbours falls on all of them alike, and round i of one variant pairs with round i of another
(`measure.statistics.paired_ratio`).

On a CPU every clock reads `perf_counter`. On a GPU:

- `CudaEventClock`, for kernels: time on the device alone. A sleeping kernel in front of the calls holds the stream
  until the host has queued all of them: launch overhead is hidden as long as the calls do not synchronize.
- `wall_clock`, for steps: what a user waits for, host dispatch included.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmkit.measure.statistics import FEWEST_PAIRS, PairedRatio, median, paired_ratio

if TYPE_CHECKING:
    import torch

Work = Callable[[], object]
MAX_CALLS_PER_SAMPLE = 10_000


@dataclass(frozen=True)
class Timing:
    """The samples of one variant, in ms per call, and the numbers of their rounds.

    Attributes:
        cache: "warm" (the same buffers call after call) or "cold" (caches overwritten before every sample).
    """

    samples_ms: tuple[float, ...]
    rounds: tuple[int, ...]
    clock: str
    cache: str
    calls_per_sample: int

    @property
    def median_ms(self) -> float:
        return median(self.samples_ms)

    def versus(self, baseline: Timing) -> PairedRatio:
        """Compare with a variant of the same `time_variants` call; above 1 this one is faster."""
        mine = dict(zip(self.rounds, self.samples_ms, strict=True))
        theirs = dict(zip(baseline.rounds, baseline.samples_ms, strict=True))
        both = sorted(mine.keys() & theirs.keys())  # never empty: all take part in round 0
        return paired_ratio([mine[number] for number in both], [theirs[number] for number in both])


class Clock:
    """Measure back-to-back calls: `perf_counter` between two synchronizations.

    Args:
        now: seconds, monotonic. Tests pass a fake.
        synchronize: waits for the device; nothing to wait for on a CPU.
    """

    name = "perf_counter"

    def __init__(
        self, *, now: Callable[[], float] = time.perf_counter, synchronize: Work = lambda: None
    ) -> None:
        self._now = now
        self._synchronize = synchronize

    def sample_ms(self, work: Work, calls: int, *, before: Sequence[Work] = ()) -> float:
        """Return milliseconds for all `calls` together; what is in `before` runs first, untimed."""
        for preparation in before:
            preparation()
        self._synchronize()
        start = self._now()
        for _ in range(calls):
            work()
        self._synchronize()
        return (self._now() - start) * 1e3


class CudaEventClock(Clock):
    """CUDA events around calls that were all queued before the first of them could start."""

    name = "cuda events"
    # What takes longer to dispatch than this is bound by the host, and its gaps are part of what a user gets. No
    # sample waits longer than half as long again.
    _LONGEST_HOLD_MS = 10.0

    def __init__(self, device: torch.device) -> None:
        import torch

        self._cuda = torch.cuda
        self._device = device
        # How long the stream is held; grows to what the slowest variant's dispatch needs, and is then the same
        # for all variants, so that none of them meets a cooler chip. A millisecond is enough for most single calls:
        # a sample that finds it too short is taken again, which costs more where calls are slow.
        self._hold_ms = 1.0
        cycles = 2_000_000
        with torch.cuda.device(device):
            torch.cuda._sleep(cycles)
            self._cycles_per_ms = cycles / _between_events(lambda: torch.cuda._sleep(cycles), 1, device)

    def sample_ms(self, work: Work, calls: int, *, before: Sequence[Work] = ()) -> float:
        dispatch_ms = 0.0

        def all_calls() -> None:
            nonlocal dispatch_ms
            began = time.perf_counter()
            for _ in range(calls):
                work()
            dispatch_ms = (time.perf_counter() - began) * 1e3

        with self._cuda.device(self._device):
            while True:
                for preparation in before:
                    preparation()
                self._cuda.synchronize(self._device)
                self._cuda._sleep(int(self._hold_ms * self._cycles_per_ms))
                elapsed_ms = _between_events(all_calls, 1, self._device)
                # Where the device took ten times as long as the host, it never waited but for the first launch.
                in_time = dispatch_ms <= max(self._hold_ms, elapsed_ms / 10)
                if in_time or dispatch_ms > self._LONGEST_HOLD_MS:
                    return elapsed_ms
                self._hold_ms = 1.5 * dispatch_ms


def _between_events(work: Work, calls: int, device: torch.device) -> float:
    """Return the milliseconds of `calls` calls in the stream, by a CUDA event before and after them."""
    import torch

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        work()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end)


class SteadyStateClock(Clock):
    """Time `steps` steps of a loop that follow `untimed` ones (by default half as many, rounded up) without a pause.

    A step leaves work to the next one (weights still being gathered, a host that runs ahead of the GPU). The first
    timed step inherits such work from the untimed ones, and the last leaves as much. GPUs are timed by CUDA events in
    the stream, CPUs by `perf_counter`.
    """

    def __init__(self, device: torch.device, steps: int, untimed: int | None = None) -> None:
        kind = "cuda events" if device.type == "cuda" else "perf_counter"
        self.name = f"{kind}, steady state of {steps} steps"
        self._device = device
        self._steps = steps
        self._untimed = math.ceil(steps / 2) if untimed is None else untimed

    def sample_ms(self, work: Work, calls: int, *, before: Sequence[Work] = ()) -> float:
        """Return milliseconds per step, times `calls` (the steps that the caller believes it asked for)."""
        for preparation in before:
            preparation()
        for _ in range(self._untimed):
            work()
        if self._device.type == "cuda":
            elapsed_ms = _between_events(work, self._steps, self._device)
        else:
            elapsed_ms = Clock(now=time.perf_counter).sample_ms(work, self._steps)
        return calls * (elapsed_ms / self._steps)


def wall_clock(device: torch.device) -> Clock:
    """Return the clock of what a user waits for on the device."""
    import torch

    return Clock(synchronize=lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else Clock()


def time_variants(
    variants: Mapping[str, Work],
    *,
    device: torch.device | str = "cpu",
    repeats: int = 20,
    warmup: int = 3,
    prepare: Mapping[str, Work] | None = None,
    cold_cache: bool = False,
    min_sample_ms: float = 0.0,
    max_seconds: float = math.inf,
    share_seconds: bool = False,
    seed: int = 0,
    clock: Clock | None = None,
    after_round: Callable[[dict[str, float]], bool] | None = None,
    turn: Callable[[str], object] = lambda name: None,
) -> dict[str, Timing]:
    """Measure every variant `repeats` times, interleaved.

    Args:
        warmup: untimed calls of each variant before the first round (compilation, autotuning, allocator).
        prepare: name -> what runs untimed before every call; each sample is then a single call.
        cold_cache: overwrite the caches before every sample; each sample is then a single call.
        min_sample_ms: calls are repeated within a sample until it takes about this long (warm cache only).
        max_seconds: no further round starts after this many seconds of rounds; at least one is made.
        share_seconds: give every variant an equal share of `max_seconds`: one that is too slow joins every second,
            fourth, eighth ... round, so that any two still meet, and is warmed up less often. Not for calls that
            other ranks wait for.
        seed: of the order of the variants within each round.
        clock: None: time on the device alone.
        after_round: called with the samples of each round, name -> ms per call; returns whether it was the last (for
            ranks, in place of `max_seconds`: their clocks would not agree).
        turn: called with the name of a variant before it is warmed up and before each of its samples, untimed.
    """
    import torch

    device = torch.device(device)
    clock = clock or (CudaEventClock(device) if device.type == "cuda" else Clock())
    flush: list[Work] = (
        [torch.zeros(cache_bytes(device), dtype=torch.uint8, device=device).zero_] if cold_cache else []
    )
    preparations = {name: [prepare[name]] if prepare and name in prepare else [] for name in variants}
    before = {name: preparations[name] + flush for name in variants}
    share = max_seconds / len(variants) if share_seconds else math.inf
    calls: dict[str, int] = {}
    every = dict.fromkeys(variants, 1)  # the variant joins rounds 0, every, 2 * every ...
    for name, work in variants.items():
        turn(name)
        began = time.monotonic()
        with global_state_kept():
            for _ in range(warmup):
                for call in (*preparations[name], work):
                    call()
                if time.monotonic() - began > share / 2:
                    break
            calls[name] = 1 if before[name] else _calls_per_sample(clock, work, min_sample_ms)
            if share < math.inf:
                began = time.monotonic()
                clock.sample_ms(work, calls[name], before=before[name])
                every[name] = _stride(repeats, time.monotonic() - began, share, max_seconds)

    order = list(variants)
    shuffle = random.Random(seed).shuffle
    samples: dict[str, dict[int, float]] = {name: {} for name in variants}  # round -> ms per call
    deadline = time.monotonic() + (math.inf if share_seconds else max_seconds)
    for number in range(repeats):
        shuffle(order)
        of_round: dict[str, float] = {}
        for name in order:
            if number % every[name] == 0:
                turn(name)
                with global_state_kept():
                    elapsed = clock.sample_ms(variants[name], calls[name], before=before[name])
                samples[name][number] = of_round[name] = elapsed / calls[name]
        enough = after_round is not None and after_round(of_round)
        if enough or time.monotonic() > deadline:
            break
    cache = "cold" if cold_cache else "warm"
    return {
        name: Timing(tuple(found.values()), tuple(found), clock.name, cache, calls[name])
        for name, found in samples.items()
    }


@contextmanager
def global_state_kept() -> Iterator[None]:
    """Restore grad mode and default dtype after the block, which may run code of the user's."""
    import torch

    with_grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_grad_enabled(with_grad)
        torch.set_default_dtype(dtype)


def _stride(repeats: int, sample_seconds: float, share: float, most: float) -> int:
    """Return the power of two n for which every n-th round of `repeats` fits into `share` seconds.

    A verdict needs `FEWEST_PAIRS` rounds: a variant gets those beyond its share, as long as they fit into `most`.
    """
    stride = 1
    while stride < repeats:
        rounds = math.ceil(repeats / stride)
        needed = math.ceil(repeats / (2 * stride)) < FEWEST_PAIRS
        if rounds * sample_seconds <= (most if needed else share):
            break
        stride *= 2
    return stride


def _calls_per_sample(clock: Clock, work: Work, min_sample_ms: float) -> int:
    """Return how many calls make a sample of about `min_sample_ms`; double until the estimate can be trusted."""
    if min_sample_ms <= 0:
        return 1
    calls = 1
    while calls < MAX_CALLS_PER_SAMPLE:
        elapsed = clock.sample_ms(work, calls)
        if elapsed >= min_sample_ms / 4:
            return max(1, min(MAX_CALLS_PER_SAMPLE, math.ceil(calls * min_sample_ms / elapsed)))
        calls *= 2
    return MAX_CALLS_PER_SAMPLE


def cache_bytes(device: torch.device | str) -> int:
    """Return more bytes than the last-level cache of `device` has."""
    import torch

    # Twice the largest L2 today (B200: 126 MB); more than the share of the last-level cache of most hosts.
    return (256 if torch.device(device).type == "cuda" else 64) * 2**20


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Switch Python's garbage collector off: with many models alive, its pauses exceed the differences measured."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
