"""`lmkit profile memory`: record every allocation of a few training steps; peaks by phase and category.

On a GPU PyTorch's allocator keeps the history; on a CPU torch.profiler reports allocations. Phases are the trainer's
ranges.
"""

from __future__ import annotations

import json
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lmkit.bench.harness import Summary, terminal_text
from lmkit.measure.environment import describe_environment
from lmkit.measure.memory import GIB
from lmkit.measure.plots import stacked_areas
from lmkit.measure.ranges import disable_ranges, observe_ranges, quietly, range_
from lmkit.measure.tables import Column, Rows, markdown_table, row_files
from lmkit.model.accounting import count_parameters
from lmkit.profile.allocations import (
    BUILD,
    CATEGORIES,
    Census,
    MemoryProfile,
    Phase,
    PhasePeak,
    Recording,
    blocks_of,
    gib_key,
    memory_finding,
    profile_memory,
)
from lmkit.profile.steps import Workload, as_the_recipe_says, build_step, call_of
from lmkit.training.setup import TrainingStep

HISTORY_ENTRIES = 2_000_000
PICTURE_POINTS = 3000
COLUMNS = (
    Column("phase", "phase"),
    Column("peak_gib", "peak GiB", ".4f"),
    *(Column(gib_key(category), category, ".4f") for category in CATEGORIES),
)


@dataclass(frozen=True)
class MemoryResult:
    """The rows of a memory profile, and the files to store."""

    rows: Rows
    files: dict[str, bytes | str]
    environment: dict[str, Any]
    notes: tuple[str, ...]

    def table(self) -> str:
        """Return the rows as text for a terminal."""
        return terminal_text(Summary("Memory", COLUMNS, self.rows, notes=self.notes))


def run_profile(work: Workload) -> MemoryResult:
    """Build the model, run `work.warmup + work.steps` steps (or passes) and record their allocations.

    Files: `memory_timeline.png`, `memory_snapshot.pickle` (for https://pytorch.org/memory_viz),
    `memory_peaks.jsonl`, `memory_peaks.csv`, `memory_report.md`.
    """
    with as_the_recipe_says(work):
        recording = record(work)
    profile = profile_memory(recording)
    rows = [_facts(work) | _row(peak) for peak in [*profile.peaks, profile.peak]]
    environment = describe_environment()
    title = str(work)
    notes = (f"GiB = 2^30 bytes, of {recording.source}",)
    files = row_files("memory_peaks", rows)
    files["memory_timeline.png"] = _picture(profile, work)
    files["memory_snapshot.pickle"] = recording.pickled
    files["memory_report.md"] = _report(rows, profile, title, environment, notes)
    return MemoryResult(rows, files, environment, notes)


def record(work: Workload) -> Recording:
    """Record every allocation from before the model exists until after the last step."""
    return _record_on_gpu(work) if work.ranks.device.type == "cuda" else _record_on_cpu(work)


class _Observer:
    """Record ranges as phases, and a census of the named tensors at the end of each."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open: list[tuple[str, float]] = []
        self.step: TrainingStep | None = None
        self.phases: list[Phase] = []
        self.censuses: list[Census] = []

    def __call__(self, name: str, opens: bool) -> None:
        if opens:
            self._open.append((name, self._clock()))
            return
        _, start = self._open.pop()
        end = self._clock()
        self.phases.append(Phase(name, start, end))
        self.take_census(end)

    def take_census(self, moment: float) -> None:
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


@contextmanager
def _observed(observer: _Observer) -> Iterator[None]:
    observe_ranges(observer)
    try:
        yield
    finally:
        disable_ranges()


def _run(work: Workload, observer: _Observer) -> None:
    with _observed(observer):
        with range_(BUILD):
            observer.step = build_step(work)
        call = call_of(observer.step, work.mode)
        for _ in range(work.warmup + work.steps):
            call()


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
        (entry["time_us"], entry["addr"], signs[entry["action"]] * entry["size"])
        for entry in snapshot["device_traces"][work.ranks.device.index or 0]
        if entry["action"] in signs
    ]
    return Recording(
        blocks_of(events), observer.phases, observer.censuses, pickle.dumps(snapshot), "the CUDA allocator"
    )


def _record_on_cpu(work: Workload) -> Recording:
    """Record on the profiler's clock: annotations in its trace mark the phases."""
    order: list[str] = []
    annotations: list[Any] = []

    class Annotating(_Observer):
        def __call__(self, name: str, opens: bool) -> None:
            if opens:
                annotation = torch.profiler.record_function(f"phase {len(order)}")
                order.append(name)
                annotation.__enter__()
                annotations.append((annotation, len(order) - 1))
                return
            annotation, number = annotations.pop()
            self.take_census(number)
            annotation.__exit__(None, None, None)

    observer = Annotating(lambda: 0.0)
    with tempfile.TemporaryDirectory(prefix="lmkit-memory-") as folder:
        recorder = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        )
        with quietly(recorder) as profiler:
            _run(work, observer)
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        document = json.loads(path.read_bytes())
    events: list[tuple[float, int, int]] = []
    spans: dict[int, tuple[float, float]] = {}
    for event in document["traceEvents"]:
        if event.get("name") == "[memory]" and event["args"].get("Device Type") == 0:
            events.append((event["ts"], event["args"]["Addr"], event["args"]["Bytes"]))
        elif event.get("cat") == "user_annotation" and event["name"].startswith("phase "):
            spans[int(event["name"].split()[1])] = (event["ts"], event["ts"] + event["dur"])
    events.sort(key=lambda event: event[0])
    phases = [Phase(order[number], *spans[number]) for number in sorted(spans)]
    censuses = [Census(spans[int(census.time)][1], census.owners) for census in observer.censuses]
    return Recording(blocks_of(events), phases, censuses, _as_snapshot(events), "the CPU allocator")


def _as_snapshot(events: list[tuple[float, int, int]]) -> bytes:
    """Return CPU allocations in the form of a CUDA snapshot, which the viewer opens."""
    entries: list[dict[str, Any]] = [
        {
            "action": "alloc" if size > 0 else "free_completed",
            "addr": address,
            "size": abs(size),
            "stream": 0,
            "time_us": int(moment),
            "frames": [],
        }
        for moment, address, size in events
    ]
    return pickle.dumps({"segments": [], "device_traces": [entries], "allocator_settings": {}})


def _facts(work: Workload) -> dict[str, Any]:
    model = work.model
    return {
        "model": model.preset or f"{model.num_layers} x {model.d_model}",
        "parameters": count_parameters(model).total,
        "context_length": model.context_length,
        "batch_size": work.batch_size,
        "pass": work.mode,
        "dtype": work.train.precision,
        "attention": model.attention,
    }


def _row(peak: PhasePeak) -> dict[str, Any]:
    by_category = {gib_key(name): size / GIB for name, size in peak.by_category.items()}
    return {"phase": peak.phase, "peak_gib": peak.bytes / GIB, **by_category}


def _picture(profile: MemoryProfile, work: Workload) -> bytes:
    # Draw over events, not time: compiling and tuning take seconds in which memory does not change.
    stride = max(1, len(profile.times) // PICTURE_POINTS)
    return stacked_areas(
        list(range(0, len(profile.times), stride)),
        {name: [size / GIB for size in sizes[::stride]] for name, sizes in profile.alive.items()},
        title=f"Memory in use: {work}",
        x_label="allocations and frees since the start",
        y_label="memory (GiB = 2^30 bytes)",
        begins=_begins(profile, work),
    )


def _begins(profile: MemoryProfile, work: Workload) -> dict[str, float]:
    """Return the picture's x for the build and for the start of every step (or pass)."""
    found = {name: float(index) for name, index in profile.begins if name == BUILD}
    runs = [index for name, index in profile.begins if name in ("step", "pass")]
    for number, index in enumerate(runs, 1 - work.warmup):
        found[f"step {number}" if number > 0 else f"warm-up {number + work.warmup}"] = index
    return found


def _report(
    rows: list[dict[str, Any]],
    profile: MemoryProfile,
    title: str,
    environment: dict[str, Any],
    notes: tuple[str, ...],
) -> str:
    largest = [asdict(block) | {"gib": block.bytes / GIB} for block in profile.largest]
    columns = (
        Column("gib", "GiB", ".4f"),
        Column("count", "count", "d"),
        Column("category", "category"),
        Column("phase", "allocated in"),
    )
    return "\n".join(
        [
            f"# Memory: {title}",
            "",
            f"torch {environment['packages']['torch']}, {environment['time_utc']}.",
            "",
            memory_finding(rows),
            "",
            "![memory_timeline.png](memory_timeline.png)",
            "",
            "## Peak of each phase, and what it consists of (GiB)",
            "",
            markdown_table(rows, COLUMNS),
            *notes,
            "",
            "## Largest allocations",
            "",
            markdown_table(largest, columns),
            "`memory_snapshot.pickle` opens in https://pytorch.org/memory_viz.",
            "",
        ]
    )
