"""Reduce allocations and frees to bytes alive over time, and to peaks by phase and category."""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmkit.measure.tables import Rows

CATEGORIES = ("parameters", "gradients", "optimizer state", "activations", "temporary")
BUILD, FORWARD, WHOLE_RUN = "build", "forward", "whole run"


@dataclass(frozen=True)
class Block:
    """One allocation. Times are in us on the recorder's clock; `freed` is None for a block alive at the end."""

    address: int
    size: int
    allocated: float
    freed: float | None

    def is_alive(self, time: float) -> bool:
        return self.allocated <= time and (self.freed is None or time < self.freed)


@dataclass(frozen=True)
class Phase:
    """A named stretch of the run."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Census:
    """The addresses of named tensors at one moment: address -> category."""

    time: float
    owners: Mapping[int, str]


@dataclass(frozen=True)
class Recording:
    """All allocations of a run. `pickled` is a snapshot for https://pytorch.org/memory_viz."""

    blocks: Sequence[Block]
    phases: Sequence[Phase]
    censuses: Sequence[Census]
    pickled: bytes
    source: str


@dataclass(frozen=True)
class PhasePeak:
    """The largest number of bytes alive during a phase (over all its instances)."""

    phase: str
    bytes: int
    by_category: dict[str, int]


@dataclass(frozen=True)
class Largest:
    """`count` blocks of one size, category and phase."""

    bytes: int
    category: str
    phase: str
    count: int


@dataclass(frozen=True)
class MemoryProfile:
    """Bytes over time.

    Attributes:
        times: us since the start; one entry per allocation or free.
        alive: category -> bytes alive after each of `times`.
        begins: (phase, index into `times` of the first change in it) of every phase of the recording.
        peaks: per phase, in the order of their first appearance.
        peak: over the whole run.
        largest: blocks, the largest first.
    """

    times: list[float]
    alive: dict[str, list[int]]
    begins: list[tuple[str, int]]
    peaks: list[PhasePeak]
    peak: PhasePeak
    largest: list[Largest] = field(default_factory=list)


def blocks_of(events: Sequence[tuple[float, int, int]]) -> list[Block]:
    """Match (time, address, size) events, positive sizes allocating and negative ones freeing.

    Drop frees of blocks that were allocated before the recording.
    """
    open_at: dict[int, tuple[float, int]] = {}
    blocks = []
    for time, address, size in events:
        if size > 0:
            open_at[address] = (time, size)
        elif address in open_at:
            allocated, whole = open_at.pop(address)
            blocks.append(Block(address, whole, allocated, time))
    blocks += [Block(address, size, allocated, None) for address, (allocated, size) in open_at.items()]
    return sorted(blocks, key=lambda block: block.allocated)


def categorize(blocks: Sequence[Block], censuses: Sequence[Census], phases: Sequence[Phase]) -> list[str]:
    """Return the category of every block.

    A census at the block's address names parameters, gradients and optimizer state. Of the rest, blocks that outlive
    their forward pass are activations; the others are temporary.
    """
    ordered = sorted(censuses, key=lambda census: census.time)
    census_times = [census.time for census in ordered]
    addresses = [sorted(census.owners) for census in ordered]
    forwards = [phase for phase in phases if phase.name == FORWARD]
    categories = []
    for block in blocks:
        first = bisect.bisect_left(census_times, block.allocated)
        last = len(ordered) if block.freed is None else bisect.bisect_left(census_times, block.freed)
        owner = next(
            (
                ordered[index].owners[address]
                for index in range(first, last)
                if (address := _first_inside(addresses[index], block)) is not None
            ),
            None,
        )
        if owner is None:
            kept = any(
                phase.start <= block.allocated <= phase.end and block.is_alive(phase.end)
                for phase in forwards
            )
            owner = "activations" if kept else "temporary"
        categories.append(owner)
    return categories


def _first_inside(addresses: Sequence[int], block: Block) -> int | None:
    """Return the lowest sorted address inside the block (a tensor may start inside an allocation), or None."""
    index = bisect.bisect_left(addresses, block.address)
    inside = index < len(addresses) and addresses[index] < block.address + block.size
    return addresses[index] if inside else None


def profile_memory(recording: Recording) -> MemoryProfile:
    """Compute bytes alive by category over time, and the peak of every phase."""
    categories = categorize(recording.blocks, recording.censuses, recording.phases)
    changes: list[tuple[float, int, str]] = []
    for block, category in zip(recording.blocks, categories, strict=True):
        changes.append((block.allocated, block.size, category))
        if block.freed is not None:
            changes.append((block.freed, -block.size, category))
    changes.sort(key=lambda change: (change[0], change[1]))  # at the same time: frees first
    start = changes[0][0] if changes else 0.0
    times: list[float] = []
    alive: dict[str, list[int]] = {category: [] for category in CATEGORIES}
    now: dict[str, int] = defaultdict(int)
    for time, size, category in changes:
        now[category] += size
        times.append(time - start)
        for name in CATEGORIES:
            alive[name].append(now[name])
    totals = [sum(column) for column in zip(*alive.values(), strict=True)]
    return MemoryProfile(
        times=times,
        alive=alive,
        begins=[(phase.name, bisect.bisect_left(times, phase.start - start)) for phase in recording.phases],
        peaks=_phase_peaks(recording.phases, times, alive, totals, start),
        peak=_peak_within(WHOLE_RUN, range(len(totals)), alive, totals),
        largest=_largest(recording, categories),
    )


def _phase_peaks(
    phases: Sequence[Phase],
    times: Sequence[float],
    alive: Mapping[str, Sequence[int]],
    totals: Sequence[int],
    start: float,
) -> list[PhasePeak]:
    peaks: dict[str, PhasePeak] = {}
    for phase in phases:
        # What is alive when the phase begins counts: the last change before it.
        first = max(0, bisect.bisect_right(times, phase.start - start) - 1)
        last = bisect.bisect_right(times, phase.end - start)
        found = _peak_within(phase.name, range(first, last), alive, totals)
        if phase.name not in peaks or found.bytes > peaks[phase.name].bytes:
            peaks[phase.name] = found
    return list(peaks.values())


def _peak_within(
    name: str, moments: range, alive: Mapping[str, Sequence[int]], totals: Sequence[int]
) -> PhasePeak:
    if not moments:
        return PhasePeak(name, 0, dict.fromkeys(CATEGORIES, 0))
    top = max(moments, key=lambda moment: totals[moment])
    return PhasePeak(name, totals[top], {category: alive[category][top] for category in CATEGORIES})


def _largest(recording: Recording, categories: Sequence[str], count: int = 10) -> list[Largest]:
    """Return the largest blocks, equal blocks of one phase together."""
    times: Counter[tuple[int, str, str]] = Counter()
    for block, category in zip(recording.blocks, categories, strict=True):
        around = [phase for phase in recording.phases if phase.start <= block.allocated <= phase.end]
        # Phases nest ("loss" in "forward" in "step"): take the innermost.
        phase = min(around, key=lambda phase: phase.end - phase.start).name if around else "-"
        times[block.size, category, phase] += 1
    return [Largest(*block, times[block]) for block in sorted(times, reverse=True)[:count]]


_HOLD_OTHERS = ("step", "pass", WHOLE_RUN)  # prefer a phase inside one of these


def peak_row(rows: Rows) -> dict[str, Any]:
    """Return the row of the phase with the highest peak."""
    return max(rows, key=lambda row: (float(row["peak_gib"]), row["phase"] not in _HOLD_OTHERS))


def memory_finding(rows: Rows) -> str:
    """Say where the peak is and what its largest part is."""
    peak = peak_row(rows)
    if not peak["peak_gib"]:
        return "Nothing was allocated."
    where = "between phases" if peak["phase"] == WHOLE_RUN else f"in {peak['phase']}"
    shares = {name: float(peak[gib_key(name)]) / float(peak["peak_gib"]) for name in CATEGORIES}
    largest = max(shares, key=lambda name: shares[name])
    return (
        f"The peak, {peak['peak_gib']:.2f} GiB (2^30 bytes), is reached {where}; "
        f"the largest part of it is {largest}: {shares[largest]:.0%}."
    )


def gib_key(category: str) -> str:
    """Return the row's key for the size of a category."""
    return category.replace(" ", "_") + "_gib"
