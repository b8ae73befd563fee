"""`lmkit profile memory`: record every allocation of a few training steps; peaks by phase and category.

On a GPU PyTorch's allocator keeps the history; on a CPU torch.profiler reports allocations. Phases are the trainer's
ranges.
"""

from __future__ import annotations

import bisect
import itertools
import json
import linecache
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lmkit.bench.context import failure_is_a_row
from lmkit.bench.summary import Summary, report_text, terminal_text
from lmkit.core.ranges import range_
from lmkit.measure.environment import describe_environment
from lmkit.measure.kineto import chrome_trace
from lmkit.measure.memory import GIB, release_memory
from lmkit.measure.plots import decorate, line_panels, stacked_areas
from lmkit.measure.ranges import disable_ranges, observe_ranges, quietly
from lmkit.measure.tables import TERMINAL_WIDTH, Column, Rows, markdown_table, row_files, terminal_table
from lmkit.model.accounting import count_parameters
from lmkit.profile.allocations import (
    BUILD,
    WHOLE_RUN,
    Census,
    MemoryProfile,
    Phase,
    Recording,
    blocks_of,
    profile_memory,
)
from lmkit.profile.steps import Mode, Workload, call_of, make_training
from lmkit.profile.write_up import gib_key, growth, most_computed, peak_row, summarize_memory
from lmkit.recipe.run_folder import ENVIRONMENT
from lmkit.recipe.schema import Recipe
from lmkit.training.setup import TrainingStep

HISTORY_ENTRIES = 2_000_000
PICTURE, PICTURE_POINTS = "memory_timeline.png", 3000
LARGEST = (
    Column("gib", "GiB", ".4f"),
    Column("count", "count", "d"),
    Column("category", "category"),
    Column("phase", "allocated in"),
)

LINES = (
    Column("gib", "GiB", ".4f"),
    Column("share", "of peak", ".0%"),
    *LARGEST[1:3],
    Column("line", "source line"),
)


@dataclass(frozen=True)
class MemoryResult:
    """The rows of a memory profile, the table for a terminal, and the files to store."""

    rows: Rows
    text: str
    files: dict[str, bytes | str]


def run_profile(work: Workload) -> MemoryResult:
    """Build the model, run `work.warmup + work.steps` steps (or passes) and record their allocations.

    Files: `memory_timeline.png`, `memory_snapshot.pickle` (for https://pytorch.org/memory_viz),
    `memory_peaks.jsonl`, `memory_peaks.csv`, `memory_report.md`, `environment.json`.
    """
    with work.numerics():
        recording = _record_on_gpu(work) if work.ranks.device.type == "cuda" else _record_on_cpu(work)
    profile = profile_memory(recording)
    rows = _rows(work, profile)
    largest = [block | {"gib": block["bytes"] / GIB} for block in profile.largest]
    tables = {"Largest allocations": markdown_table(largest, LARGEST)}
    summary = summarize_memory(rows)
    peak = max(1, sum(profile.peaks[WHOLE_RUN].values()))
    lines = [line | {"gib": line["bytes"] / GIB, "share": line["bytes"] / peak} for line in profile.lines]
    if lines:
        tables = {"Source lines that hold most at the peak": markdown_table(lines, LINES), **tables}
    top = [f"{line['share']:.0%} {line['category']} of {line['line'].split('  ')[0]}" for line in lines[:3]]
    summary = replace(
        summary,
        title=f"Memory: {work}",
        findings=[*summary.findings, *([f"Most of the peak: {', '.join(top)}."] if top else [])],
        tables=tables,
        notes=(f"GiB = 2^30 bytes, of {recording.source}",),
    )
    environment = describe_environment()
    drawn = decorate(PICTURE, lambda: _picture(profile, work))
    pictures = {PICTURE: drawn} if drawn else {}
    files = row_files("memory_peaks", rows) | {
        **pictures,
        "memory_snapshot.pickle": recording.pickled,
        "memory_report.md": report_text(summary, environment, [*pictures]),
        ENVIRONMENT: json.dumps(environment, indent=1) + "\n",
    }
    columns = (*LINES[:-1], replace(LINES[-1], header="the lines that hold most"))
    shown = terminal_table(lines[:3], columns, width=TERMINAL_WIDTH)
    return MemoryResult(rows, terminal_text(summary) + (f"\n{shown}" if lines else ""), files)


def _rows(work: Workload, profile: MemoryProfile) -> Rows:
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
        for phase, peak in profile.peaks.items()
    ]


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
        for _ in range(work.warmup + work.steps):
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
    events = [
        (
            entry["time_us"],
            entry["addr"],
            signs[entry["action"]] * entry["size"],
            _line(entry.get("frames", [])),
        )
        for entry in snapshot["device_traces"][work.ranks.device.index or 0]
        if entry["action"] in signs
    ]
    pickled = pickle.dumps(snapshot)
    return Recording(blocks_of(events), observer.phases, observer.censuses, pickled, "the CUDA allocator")


def _line(frames: list[dict[str, Any]]) -> str:
    return line_of((frame["filename"], frame["line"]) for frame in frames)


def _record_on_cpu(work: Workload) -> Recording:
    """Record on the profiler's clock: an annotation in its trace marks every moment that the observer asks for."""
    count = itertools.count()

    def mark() -> float:
        number = next(count)
        with torch.profiler.record_function(f"moment {number}"):
            return number

    observer = _Observer(mark)
    activities = [torch.profiler.ProfilerActivity.CPU]
    lines = Lines()
    with (
        quietly(
            torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True)
        ) as profiler,
        # Compiled code is no sequence of operations.
        lines if work.model.compile == "none" else nullcontext(),
    ):
        _run(work, observer)
    memory: list[tuple[float, int, int]] = []
    moments: dict[int, float] = {}
    spans: list[tuple[float, float, int]] = []  # of operations, with the number of their line
    for event in json.loads(chrome_trace(profiler))["traceEvents"]:
        if event.get("name") == "[memory]" and event["args"].get("Device Type") == 0:
            memory.append((event["ts"], event["args"]["Addr"], event["args"]["Bytes"]))
        elif event.get("cat") == "user_annotation":
            what, _, number = event["name"].rpartition(" ")
            if what == "moment":
                moments[int(number)] = event["ts"]
            elif f"{what} " == Lines.PREFIX:
                spans.append((event["ts"], event["ts"] + event["dur"], int(number)))
    memory.sort(key=lambda event: event[0])
    events = _with_lines(memory, sorted(spans), lines.found)
    phases = [Phase(name, moments[int(start)], moments[int(end)]) for name, start, end in observer.phases]
    censuses = [Census(moments[int(moment)], owners) for moment, owners in observer.censuses]
    return Recording(blocks_of(events), phases, censuses, _as_snapshot(events), "the CPU allocator")


def _with_lines(
    events: Sequence[tuple[float, int, int]], spans: Sequence[tuple[float, float, int]], lines: Sequence[str]
) -> list[tuple[float, int, int, str]]:
    """Add to every event the line of the span around it; spans (start, end, line number) do not overlap."""
    starts = [start for start, _, _ in spans]
    told = []
    for event in events:
        index = bisect.bisect_right(starts, event[0]) - 1
        around = index >= 0 and event[0] <= spans[index][1]
        told.append((*event, lines[spans[index][2]] if around else ""))
    return told


def _as_snapshot(events: list[tuple[float, int, int, str]]) -> bytes:
    """Return CPU allocations in the form of a CUDA snapshot, which the viewer opens."""
    entries: list[dict[str, Any]] = [
        {
            "action": "alloc" if size > 0 else "free_completed",
            "addr": address,
            "size": abs(size),
            "stream": 0,
            "time_us": int(moment),
            "frames": [{"filename": line, "line": 0, "name": ""}] if line else [],
        }
        for moment, address, size, line in events
    ]
    return pickle.dumps({"segments": [], "device_traces": [entries], "allocator_settings": {}})


def _picture(profile: MemoryProfile, work: Workload) -> bytes:
    # Draw over events, not time: compiling and tuning take seconds in which memory does not change.
    changes = len(profile.alive["parameters"])
    stride = max(1, changes // PICTURE_POINTS)
    begins = {name: float(index) for name, index in profile.begins if name == BUILD}
    runs = [index for name, index in profile.begins if name in ("step", "pass")]
    for number, index in enumerate(runs, 1 - work.warmup):
        begins[f"step {number}" if number > 0 else f"warm-up {number + work.warmup}"] = index
    return stacked_areas(
        range(0, changes, stride),
        {name: sizes[::stride] / GIB for name, sizes in profile.alive.items()},
        title=f"Memory in use: {work}",
        x_label="allocations and frees since the start",
        y_label="memory (GiB = 2^30 bytes)",
        begins=begins,
    )


AUTOGRAD = "autograd"
"""The line of what PyTorch's own backward operations allocate, in threads without a Python stack."""
_PACKAGE = Path(__file__).resolve().parent.parent
_PASSED_OVER = tuple(f"{_PACKAGE / part}" for part in ("profile", "measure", "autograd.py"))
_LIBRARIES = (os.path.dirname(os.__file__), os.path.dirname(os.path.dirname(torch.__file__)), "<", "?")

Place = tuple[str, int]
"""A file and a line number."""


def line_of(stack: Iterable[Place]) -> str:
    """Return `core/model.py:130  the code` of the innermost line that counts; `AUTOGRAD` without one.

    Args:
        stack: innermost first.
    """
    for file, number in stack:
        ours = file.startswith(f"{_PACKAGE}{os.sep}")
        if not file or file.startswith(_PASSED_OVER) or (not ours and file.startswith(_LIBRARIES)):
            continue
        name = os.path.relpath(file, _PACKAGE) if ours else os.path.basename(file)
        return f"{name}:{number}  {linecache.getline(file, number).strip()[:60]}".rstrip()
    return AUTOGRAD


class Lines(TorchDispatchMode):
    """Note the line of every operation, under a number by which it is annotated in a trace of torch.profiler.

    Attributes:
        found: the lines, by number.
    """

    PREFIX = "line "

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._numbers: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        line = line_of(_stack())
        number = self._numbers.setdefault(line, len(self.found))
        if number == len(self.found):
            self.found.append(line)
        with torch.profiler.record_function(f"{self.PREFIX}{number}"):
            return func(*args, **(kwargs or {}))


def _stack() -> Iterator[Place]:
    """Yield the caller's stack, innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]


TABLE_PICTURE = "memory_contexts.png"
MODES: tuple[Mode, ...] = ("forward", "step")
SNAPSHOT = "memory_snapshot.pickle"  # of every cell they would be hundreds of megabytes
COLUMNS = (
    Column("attention", "attention"),
    Column("context_length", "context", "d"),
    Column("dtype", "precision"),
    Column("forward_gib", "forward GiB", ".3f", instead="status"),
    Column("forward_computed_gib", "computed", ".3f"),
    Column("step_gib", "step GiB", ".3f"),
    Column("step_computed_gib", "computed", ".3f"),
)


def table(
    recipes: Sequence[Recipe], *, steps: int, write: Callable[[Mapping[str, bytes | str]], None]
) -> tuple[Rows, str]:
    """Profile recipes; return a row of each, and the table for a terminal. What does not fit, or fails, is a row.

    Args:
        write: takes files, most of them in folders: after each recipe its own and those of the table so far. So a run
            that is cut short leaves what it measured.
    """
    rows: Rows = []
    of_steps: list[Rows] = []
    text = ""
    for recipe in recipes:
        files: dict[str, bytes | str] = {}
        works = {mode: Workload(recipe, mode, steps, warmup=0) for mode in MODES}
        model, train = works["step"].model, works["step"].train
        row: dict[str, Any] = {
            "attention": model.attention,
            "context_length": model.context_length,
            "dtype": train.precision,
            "batch_size": train.batch_size,
            "status": "ok",
        }
        for mode, work in works.items():
            with failure_is_a_row(row, work.ranks.device):
                result = run_profile(work)
                row[f"{mode}_gib"] = peak_row(result.rows)["peak_gib"]
                row[f"{mode}_computed_gib"] = most_computed(result.rows)
                of_steps += [result.rows] if mode == "step" else []
                folder = f"{model.attention}_{mode}_{model.context_length}_{train.precision}"
                files |= {f"{folder}/{name}": text for name, text in result.files.items() if name != SNAPSHOT}
            release_memory(work.ranks.device)
        rows.append(row)
        text, of_table = _summarized(rows, growth(of_steps))
        write(files | of_table)
    return rows, text


def _summarized(rows: Rows, findings: Sequence[str]) -> tuple[str, dict[str, bytes | str]]:
    """Return the table for a terminal, and its files."""
    summary = Summary(
        "Memory by context and precision",
        COLUMNS,
        rows,
        about=f"Batch {rows[0]['batch_size']}",
        findings=findings,
        notes=(
            "GiB = 2^30 bytes, at the peak; computed: the largest sum of activations and temporary tensors at the "
            "peak of a phase; every cell has a folder with its phases and source lines",
        ),
    )
    environment = describe_environment()
    drawn = decorate(TABLE_PICTURE, lambda: picture(rows))
    pictures = {TABLE_PICTURE: drawn} if drawn else {}
    return terminal_text(summary), {
        **pictures,
        "memory_contexts.json": json.dumps(rows, indent=1) + "\n",
        "memory_contexts_report.md": report_text(summary, environment, [*pictures]),
        ENVIRONMENT: json.dumps(environment, indent=1) + "\n",
    }


def picture(rows: Rows) -> bytes:
    """Draw the computed memory over the context on logarithmic axes, where a square is twice as steep as a line."""
    shown = [
        {**row, "mode": mode, "gib": row.get(f"{mode}_computed_gib")} for row, mode in product(rows, MODES)
    ]
    return line_panels(
        shown,
        "context_length",
        Column("gib", "memory (GiB = 2^30 bytes)"),
        panel="mode",
        group="attention",
        kind="dtype",
        title="What forward and step compute: activations and temporary tensors at the peak",
        x_label="context (tokens)",
        log_y=True,
    )
