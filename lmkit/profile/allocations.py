"""Reduce allocations and frees to bytes alive over time, and to peaks by phase and category."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lmkit.measure.tables import Rows

CATEGORIES = ("parameters", "gradients", "optimizer state", "activations", "temporary")
BUILD, FORWARD, WHOLE_RUN = "build", "forward", "whole run"


class Block(NamedTuple):
    """One allocation. Times are in us on the recorder's clock; `freed` is infinite for a block alive at the end;
    `line` is the source line that it is due to, if known."""

    address: int
    size: int
    allocated: float
    freed: float = math.inf
    line: str = ""


class Phase(NamedTuple):
    """A named stretch of the run."""

    name: str
    start: float
    end: float


class Census(NamedTuple):
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
class MemoryProfile:
    """Bytes over time.

    Attributes:
        alive: category -> bytes alive after each allocation or free, (changes,).
        begins: (phase, index into `alive` of the first change in it) of every phase of the recording.
        peaks: phase -> category -> bytes at the moment when most are alive during the phase (over all its instances).
            In the order of their first start; the whole run is last.
        largest: blocks, the largest first: their size in bytes, category, phase, and count.
        lines: what is alive when most is, by source line and category, the most bytes first: bytes and count.
    """

    alive: dict[str, Any]
    begins: list[tuple[str, int]]
    peaks: dict[str, dict[str, int]]
    largest: Rows
    lines: Rows


def blocks_of(events: Sequence[tuple[Any, ...]]) -> list[Block]:
    """Match (time, address, size) events, positive sizes allocating and negative ones freeing.

    Drop frees of blocks that were allocated before the recording. An event may have a source line, too.
    """
    open_at: dict[int, Block] = {}
    freed = []
    for time, address, size, *line in events:
        if size > 0:
            open_at[address] = Block(address, size, time, math.inf, *line)
        elif address in open_at:
            freed.append(open_at.pop(address)._replace(freed=time))
    return sorted([*freed, *open_at.values()], key=lambda block: block.allocated)


def categorize(blocks: Sequence[Block], censuses: Sequence[Census], phases: Sequence[Phase]) -> list[str]:
    """Return the category of every block.

    A census at the block's address names parameters, gradients and optimizer state. Of the rest, blocks that outlive
    their forward pass are activations; the others are temporary.
    """
    ordered = sorted(censuses, key=lambda census: census.time)
    times = [census.time for census in ordered]
    addresses = [sorted(census.owners) for census in ordered]
    forwards = [phase for phase in phases if phase.name == FORWARD]

    def category(block: Block) -> str:
        for census in range(
            bisect.bisect_left(times, block.allocated), bisect.bisect_left(times, block.freed)
        ):
            # A tensor may start inside an allocation.
            index = bisect.bisect_left(addresses[census], block.address)
            if index < len(addresses[census]) and addresses[census][index] < block.address + block.size:
                return ordered[census].owners[addresses[census][index]]
        kept = any(phase.start <= block.allocated <= phase.end < block.freed for phase in forwards)
        return "activations" if kept else "temporary"

    return [category(block) for block in blocks]


def profile_memory(recording: Recording) -> MemoryProfile:
    """Compute bytes alive by category over time, and the peak of every phase."""
    categories = categorize(recording.blocks, recording.censuses, recording.phases)
    changes = []
    for block, category in zip(recording.blocks, categories, strict=True):
        changes.append((block.allocated, block.size, category))
        if block.freed < math.inf:
            changes.append((block.freed, -block.size, category))
    changes.sort()  # at the same time: frees first
    times = np.array([time for time, _, _ in changes], dtype=np.float64)
    alive = {
        name: np.cumsum([size if category == name else 0 for _, size, category in changes], dtype=np.int64)
        for name in CATEGORIES
    }
    totals = np.sum(list(alive.values()), axis=0)
    peaks: dict[str, dict[str, int]] = {}
    phases = sorted(recording.phases, key=lambda phase: phase.start)
    for phase in (*phases, Phase(WHOLE_RUN, -math.inf, math.inf)):
        # What is alive when the phase begins counts: the last change before it.
        first = max(0, int(np.searchsorted(times, phase.start, "right")) - 1)
        last = int(np.searchsorted(times, phase.end, "right"))
        peak = dict.fromkeys(CATEGORIES, 0)
        if first < last:
            top = first + int(totals[first:last].argmax())
            peak = {name: int(alive[name][top]) for name in CATEGORIES}
        if sum(peak.values()) > sum(peaks.setdefault(phase.name, peak).values()):
            peaks[phase.name] = peak
    begins = [(phase.name, int(np.searchsorted(times, phase.start))) for phase in phases]
    at_peak = times[int(totals.argmax())] if len(times) else 0.0
    lines = _lines(recording.blocks, categories, at_peak)
    return MemoryProfile(alive, begins, peaks, _largest(recording, categories), lines)


def _lines(blocks: Sequence[Block], categories: Sequence[str], moment: float, most: int = 10) -> Rows:
    """Return what is alive at a moment by source line; nothing if no line is known."""
    sizes: Counter[tuple[str, str]] = Counter()
    counts: Counter[tuple[str, str]] = Counter()
    for block, category in zip(blocks, categories, strict=True):
        if block.line and block.allocated <= moment < block.freed:
            sizes[block.line, category] += block.size
            counts[block.line, category] += 1
    return [
        {"bytes": size, "count": counts[key], "category": key[1], "line": key[0]}
        for key, size in sizes.most_common(most)
    ]


def _largest(recording: Recording, categories: Sequence[str], most: int = 10) -> Rows:
    """Return the largest blocks, equal blocks of one phase together."""
    counts: Counter[tuple[int, str, str]] = Counter()
    for block, category in zip(recording.blocks, categories, strict=True):
        around = [phase for phase in recording.phases if phase.start <= block.allocated <= phase.end]
        # Phases nest ("loss" in "forward" in "step"): take the innermost.
        phase = min(around, key=lambda phase: phase.end - phase.start).name if around else "-"
        counts[block.size, category, phase] += 1
    return [
        {"bytes": size, "category": category, "phase": phase, "count": counts[size, category, phase]}
        for size, category, phase in sorted(counts, reverse=True)[:most]
    ]
