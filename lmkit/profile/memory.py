"""`lmkit profile memory`: record every allocation of a few training steps; peaks by phase and category.

On a GPU PyTorch's allocator keeps the history, with the source line of each allocation; on a CPU torch.profiler
reports allocations. Phases are the trainer's ranges.
"""

from __future__ import annotations

import bisect
import itertools
import json
import linecache
import math
import os
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from lmkit.bench.failures import failure_is_a_row
from lmkit.bench.summary import Summary, terminal_text
from lmkit.core.ranges import range_
from lmkit.measure.memory import GIB, release_memory
from lmkit.measure.plots import decorate, stacked_areas
from lmkit.measure.ranges import disable_ranges, observe_ranges, quietly
from lmkit.measure.tables import Column, Rows, markdown_table, row_files
from lmkit.measure.trace import chrome_trace
from lmkit.model.accounting import count_parameters
from lmkit.profile.run import Mode, Profiled, Workload, call_of, make_training, write_profile
from lmkit.profile.summary import BUILD, CATEGORIES, WHOLE_RUN, gib_key, peak_row, summarize_memory
from lmkit.recipe.recipe import Recipe
from lmkit.training.process import numerics
from lmkit.training.setup import TrainingStep

HISTORY_ENTRIES = 2_000_000
PICTURE, PICTURE_POINTS = "memory_timeline.png", 3000
MOST_LINES = 10


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
    """All allocations of a run. `pickled`: of a GPU, a snapshot for https://pytorch.org/memory_viz."""

    blocks: Sequence[Block]
    phases: Sequence[Phase]
    censuses: Sequence[Census]
    pickled: bytes | None
    source: str


@dataclass(frozen=True)
class MemoryProfile:
    """Bytes over time.

    Attributes:
        alive: category -> bytes alive after each allocation or free, (changes,).
        begins: (phase, index into `alive` of the first change in it) of every phase of the recording.
        peaks: phase -> category -> bytes when most are alive during the phase, over all its instances. The whole run
            is last.
        lines: what is alive when most is, by source line and category, the most bytes first.
    """

    alive: dict[str, Any]
    begins: list[tuple[str, int]]
    peaks: dict[str, dict[str, int]]
    lines: Rows


# ---- from allocations to peaks


def blocks_of(events: Iterable[tuple[Any, ...]]) -> list[Block]:
    """Match (time, address, size) events, positive sizes allocating and negative ones freeing.

    Drop frees of blocks that were allocated before the recording. An event may have a source line, too.
    """
    open_at: dict[int, Block] = {}
    freed = []
    for moment, address, size, *line in events:
        if size > 0:
            open_at[address] = Block(address, size, moment, math.inf, *line)
        elif address in open_at:
            freed.append(open_at.pop(address)._replace(freed=moment))
    return sorted([*freed, *open_at.values()], key=lambda block: block.allocated)


def categorize(blocks: Sequence[Block], censuses: Sequence[Census], phases: Sequence[Phase]) -> list[str]:
    """Return the category of every block.

    A census at the block's address names parameters, gradients and optimizer state. Of the rest, blocks that outlive
    their forward pass are activations; the others are temporary.
    """
    ordered = sorted(censuses, key=lambda census: census.time)
    times = [census.time for census in ordered]
    addresses = [sorted(census.owners) for census in ordered]
    forwards = [phase for phase in phases if phase.name == "forward"]

    def category(block: Block) -> str:
        for i in range(bisect.bisect_left(times, block.allocated), bisect.bisect_left(times, block.freed)):
            # A tensor may start inside an allocation.
            index = bisect.bisect_left(addresses[i], block.address)
            if index < len(addresses[i]) and addresses[i][index] < block.address + block.size:
                return ordered[i].owners[addresses[i][index]]
        kept = any(phase.start <= block.allocated <= phase.end < block.freed for phase in forwards)
        return "activations" if kept else "temporary"

    return [category(block) for block in blocks]


def profile_memory(recording: Recording) -> MemoryProfile:
    """Compute bytes alive by category over time, and the peak of every phase."""
    blocks = recording.blocks
    categories = categorize(blocks, recording.censuses, recording.phases)
    changes = []
    for block, category in zip(blocks, categories, strict=True):
        changes.append((block.allocated, block.size, category))
        if block.freed < math.inf:
            changes.append((block.freed, -block.size, category))
    changes.sort()  # at the same time: frees first
    times = np.array([moment for moment, _, _ in changes], dtype=np.float64)
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
    sizes: Counter[tuple[str, str]] = Counter()
    for block, category in zip(blocks, categories, strict=True):
        if block.line and block.allocated <= at_peak < block.freed:
            sizes[block.line, category] += block.size
    most = sizes.most_common(MOST_LINES)
    lines = [{"bytes": size, "category": category, "line": line} for (line, category), size in most]
    return MemoryProfile(alive, begins, peaks, lines)


# ---- recording


class _Observer:
    """Record ranges as phases, and a census of the named tensors at the end of each."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open: list[float] = []
        self.step: TrainingStep | None = None
        self.phases: list[Phase] = []
        self.censuses: list[Census] = []

    def __call__(self, name: str, opens: bool) -> None:
        moment = self._clock()
        if opens:
            self._open.append(moment)
            return
        self.phases.append(Phase(name, self._open.pop(), moment))
        if self.step is not None:
            self.censuses.append(Census(moment, _owners(self.step)))


def _owners(step: TrainingStep) -> dict[int, str]:
    """Return address -> category for parameters, gradients and optimizer state."""
    owners: dict[int, str] = {}
    for slots in step.optimizer.state.values():
        for value in slots.values():
            if isinstance(value, torch.Tensor):
                owners[value.untyped_storage().data_ptr()] = "optimizer state"
    for parameter in step.model.parameters():
        if parameter.grad is not None:
            owners[parameter.grad.untyped_storage().data_ptr()] = "gradients"
        owners[parameter.untyped_storage().data_ptr()] = "parameters"
    return owners


def _run(work: Workload, observer: _Observer) -> None:
    observe_ranges(observer)
    try:
        with range_(BUILD):
            observer.step = make_training(work)
        call = call_of(observer.step, work.mode)
        for _ in range(work.steps):
            call()
    finally:
        disable_ranges()


def _unix_us() -> float:
    # Events carry whole us: keep a distance, so that no event falls on the wrong side of a phase's border.
    time.sleep(50e-6)
    return time.time_ns() / 1e3


def _record_on_gpu(work: Workload) -> Recording:
    memory = torch.cuda.memory
    observer = _Observer(_unix_us)
    memory._record_memory_history(enabled="all", context="all", stacks="python", max_entries=HISTORY_ENTRIES)
    try:
        _run(work, observer)
        torch.cuda.synchronize()
        snapshot = memory._snapshot()
    finally:
        memory._record_memory_history(enabled=None)
    signs = {"alloc": 1, "free_completed": -1}
    events = []
    for entry in snapshot["device_traces"][work.ranks.device.index or 0]:
        if sign := signs.get(entry["action"]):
            stack = ((frame["filename"], frame["line"]) for frame in entry.get("frames", []))
            events.append((entry["time_us"], entry["addr"], sign * entry["size"], line_of(stack)))
    pickled = pickle.dumps(snapshot)
    return Recording(blocks_of(events), observer.phases, observer.censuses, pickled, "the CUDA allocator")


def _record_on_cpu(work: Workload) -> Recording:
    """Record on the profiler's clock: an annotation in its trace marks every moment that the observer asks for."""
    count = itertools.count()

    def mark() -> float:
        number = next(count)
        with torch.profiler.record_function(f"moment {number}"):
            return number

    observer = _Observer(mark)
    activities = [torch.profiler.ProfilerActivity.CPU]
    profiler = torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True)
    with quietly(profiler):
        _run(work, observer)
    events: list[tuple[float, int, int]] = []
    moments: dict[int, float] = {}
    for event in json.loads(chrome_trace(profiler))["traceEvents"]:
        if event.get("name") == "[memory]" and event["args"].get("Device Type") == 0:
            events.append((event["ts"], event["args"]["Addr"], event["args"]["Bytes"]))
        elif event.get("cat") == "user_annotation" and event["name"].startswith("moment "):
            moments[int(event["name"].split()[1])] = event["ts"]
    events.sort(key=lambda event: event[0])
    phases = [Phase(name, moments[int(start)], moments[int(end)]) for name, start, end in observer.phases]
    censuses = [Census(moments[int(moment)], owners) for moment, owners in observer.censuses]
    return Recording(blocks_of(events), phases, censuses, None, "the CPU allocator")


AUTOGRAD = "autograd"
"""The line of what PyTorch's own backward operations allocate, in threads without a Python stack."""
_PACKAGE = Path(__file__).resolve().parent.parent
_PASSED_OVER = tuple(f"{_PACKAGE / part}" for part in ("profile", "measure", "autograd.py"))
_LIBRARIES = (os.path.dirname(os.__file__), os.path.dirname(os.path.dirname(torch.__file__)), "<", "?")


def line_of(stack: Iterable[tuple[str, int]]) -> str:
    """Return `core/model.py:130  the code` of the innermost line that counts, the first; `AUTOGRAD` without one."""
    for file, number in stack:
        ours = file.startswith(f"{_PACKAGE}{os.sep}")
        if not file or file.startswith(_PASSED_OVER) or (not ours and file.startswith(_LIBRARIES)):
            continue
        name = os.path.relpath(file, _PACKAGE) if ours else os.path.basename(file)
        return f"{name}:{number}  {linecache.getline(file, number).strip()[:60]}".rstrip()
    return AUTOGRAD


# ---- results

LINES = (
    Column("gib", "GiB", ".4f"),
    Column("share", "of peak", ".0%"),
    Column("category", "category"),
    Column("line", "source line"),
)
MODES: tuple[Mode, ...] = ("forward", "step")
CONTEXTS = (
    Column("attention", "attention"),
    Column("context_length", "context", "d"),
    Column("dtype", "precision"),
    Column("forward_gib", "forward GiB", ".3f", instead="status"),
    Column("forward_computed_gib", "computed", ".3f"),
    Column("step_gib", "step GiB", ".3f"),
    Column("step_computed_gib", "computed", ".3f"),
)


def run_memory(recipe: Recipe, output: Path, *, mode: Mode, steps: int, snapshot: bool = True) -> Profiled:
    """Record the memory of training steps (or passes): peaks by phase, category and source line.

    `snapshot`: of a GPU, write `memory_snapshot.pickle` for https://pytorch.org/memory_viz.
    """
    work = Workload(recipe, mode, steps)
    with numerics(recipe.run, work.ranks):
        recording = (_record_on_gpu if work.ranks.device.type == "cuda" else _record_on_cpu)(work)
    profile = profile_memory(recording)
    rows = _rows(work, profile.peaks)
    summary = summarize_memory(rows)
    peak = max(1, sum(profile.peaks[WHOLE_RUN].values()))
    lines = [line | {"gib": line["bytes"] / GIB, "share": line["bytes"] / peak} for line in profile.lines]
    top = [f"{line['share']:.0%} {line['category']} of {line['line'].split('  ')[0]}" for line in lines[:3]]
    summary = replace(
        summary,
        title=f"Memory: {work}",
        findings=[*summary.findings, *([f"Most of the peak: {', '.join(top)}."] if top else [])],
        tables={"Source lines that hold most at the peak": markdown_table(lines, LINES)} if lines else {},
        notes=(f"GiB = 2^30 bytes, of {recording.source}",),
    )
    drawn = decorate(PICTURE, lambda: _picture(profile, work))
    files = {
        **row_files("memory_peaks", rows),
        **({PICTURE: drawn} if drawn else {}),
        **({"memory_snapshot.pickle": recording.pickled} if snapshot and recording.pickled else {}),
    }
    written = write_profile(output, files, "memory_report.md", summary)
    return Profiled(str(output), written, {"peaks": rows}, terminal_text(summary))


def _rows(work: Workload, peaks: Mapping[str, Mapping[str, int]]) -> Rows:
    model = work.model
    facts = {
        "model": model.preset or f"{model.num_layers} x {model.d_model}",
        "parameters": count_parameters(model).total,
        "context_length": model.context_length,
        "batch_size": work.train.batch_size,
        "pass": work.mode,
        "dtype": work.train.precision,
        "attention": model.attention,
    }
    return [
        {
            **facts,
            "phase": phase,
            "peak_gib": sum(peak.values()) / GIB,
            **{gib_key(category): size / GIB for category, size in peak.items()},
        }
        for phase, peak in peaks.items()
    ]


def _picture(profile: MemoryProfile, work: Workload) -> bytes:
    # Draw over events, not time: compiling and tuning take seconds in which memory does not change.
    changes = len(profile.alive["parameters"])
    stride = max(1, changes // PICTURE_POINTS)
    begins = {name: float(index) for name, index in profile.begins if name == BUILD}
    runs = [index for name, index in profile.begins if name in ("step", "pass")]
    begins |= {f"step {number}": index for number, index in enumerate(runs, 1)}
    return stacked_areas(
        range(0, changes, stride),
        {name: sizes[::stride] / GIB for name, sizes in profile.alive.items()},
        title=f"Memory in use: {work}",
        x_label="allocations and frees since the start",
        y_label="memory (GiB = 2^30 bytes)",
        begins=begins,
    )


def most_computed(rows: Rows) -> float:
    """Return the most GiB of activations and temporary tensors at the peak of a phase of the steps.

    The peak of the whole run may lie in the optimizer's phase, where they are gone.
    """
    phases = [row for row in rows if row["phase"] not in (BUILD, WHOLE_RUN)]
    return max(row["activations_gib"] + row["temporary_gib"] for row in phases)


def run_memory_table(recipes: Sequence[Recipe], output: Path, *, steps: int) -> Profiled:
    """Profile the forward pass and training steps of each recipe, in folders of their own; a row for each recipe.

    What does not fit, or fails, is a row. The table is written after each recipe.
    """
    rows: Rows = []
    for recipe in recipes:
        work = Workload(recipe)
        row: dict[str, Any] = {
            "attention": work.model.attention,
            "context_length": work.model.context_length,
            "dtype": work.train.precision,
            "batch_size": work.train.batch_size,
            "status": "ok",
        }
        for mode in MODES:
            folder = f"{row['attention']}_{mode}_{row['context_length']}_{row['dtype']}"
            with failure_is_a_row(row, work.ranks.device):
                # Without snapshots: of every cell they would be hundreds of megabytes.
                done = run_memory(recipe, output / folder, mode=mode, steps=steps, snapshot=False)
                peaks = done.summary["peaks"]
                row[f"{mode}_gib"] = peak_row(peaks)["peak_gib"]
                row[f"{mode}_computed_gib"] = most_computed(peaks)
            release_memory(work.ranks.device)
        rows.append(row)
        summary = Summary(
            "Memory by context and precision",
            CONTEXTS,
            rows,
            about=f"Batch {row['batch_size']}",
            notes=(
                "GiB = 2^30 bytes, at the peak; computed: the largest sum of activations and temporary tensors at "
                "the peak of a phase; every cell has a folder with its phases and source lines",
            ),
        )
        files = {"memory_contexts.json": json.dumps(rows, indent=1) + "\n"}
        written = write_profile(output, files, "memory_contexts_report.md", summary)
    is_fine = all(row["status"] != "failed" for row in rows)
    return Profiled(str(output), written, {"rows": rows}, terminal_text(summary), is_fine)
