"""One summary for all engines: launches, GPU busy and idle share, CPU dispatch against GPU work per range.

The CPU's time in CUDA calls is split in two: calls that ask the GPU for work (dispatch), and calls that wait for it
to finish (synchronisations, blocking copies). A step that dispatches all the time is bound by the CPU; one that waits
is bound by the GPU.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import asdict, dataclass
from typing import Any

from lmkit.measure.tables import TERMINAL_WIDTH, Column, markdown_table, terminal_table


@dataclass(frozen=True)
class RangeSummary:
    """One range name; times are medians per instance, in ms. None: the recording cannot tell.

    Attributes:
        wall_ms: from its start to its end on the CPU.
        dispatch_ms: union of its CUDA API calls that ask for work: how long the CPU was busy launching.
        wait_ms: union of those that wait for the GPU.
        gpu_ms: union of the device work that those calls caused, whenever it ran.
        launches: kernel launches.
    """

    name: str
    instances: int
    wall_ms: float
    dispatch_ms: float | None
    wait_ms: float | None
    gpu_ms: float | None
    launches: float | None

    @property
    def dispatch_share(self) -> float | None:
        """Dispatch per wall time: near 1 the CPU does nothing but launch."""
        return None if self.dispatch_ms is None or not self.wall_ms else self.dispatch_ms / self.wall_ms


@dataclass(frozen=True)
class NamedTime:
    """A kernel (device time) or CPU operator (self time); `share` of the total of its kind."""

    name: str
    calls: int
    total_ms: float
    share: float


@dataclass(frozen=True)
class Summary:
    """What a profile says. Fields are None where the recording has no such table (a CPU, an old nsys).

    `steps` counts the ranges of the window: steps, or passes where only those were recorded (see `window`);
    `undisturbed_ms` is what one of them takes without the profiler, `undisturbed_gpu_share` the share of that which
    its GPU work fills.
    """

    engine: str
    source: str
    window: str
    window_ms: float
    undisturbed_ms: float | None
    steps: int
    launches: int | None
    kernels: int | None
    launches_per_forward: float | None
    launches_per_step: float | None
    gpu_busy_share: float | None
    gpu_idle_share: float | None
    undisturbed_gpu_share: float | None
    dispatch_share: float | None
    wait_share: float | None
    communication_ms: float | None
    communication_overlap_share: float | None
    ranges: tuple[RangeSummary, ...]
    top_kernels: tuple[NamedTime, ...]
    top_ops: tuple[NamedTime, ...]
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """JSON types only."""
        summary = asdict(self)
        for row, entry in zip(summary["ranges"], self.ranges, strict=True):
            row["dispatch_share"] = entry.dispatch_share
        return summary

    def text(self) -> str:
        """For a terminal, at most 100 columns."""
        return self._render(terminal_table)

    def markdown(self) -> str:
        """A report."""
        return f"# Profile of {self.source} ({self.engine})\n\n" + self._render(markdown_table)

    def _render(self, table: Any) -> str:
        facts = [
            {"what": label, "value": format(value, spec)}
            for label, value, spec in self._facts()
            if value is not None
        ]
        parts = [table(facts, [Column("what", "what"), Column("value", "value")])]
        missing = ", ".join(label for label, value, _ in self._facts() if value is None)
        if missing:
            parts.append(textwrap.fill(f"not recorded: {missing}", TERMINAL_WIDTH) + "\n")
        if self.ranges:
            rows = [asdict(entry) | {"dispatch_share": entry.dispatch_share} for entry in self.ranges]
            # A CPU's recording has nothing to say about a GPU, and a column of dashes says less.
            known = [column for column in _RANGE_COLUMNS if any(row[column.key] is not None for row in rows)]
            parts.append(table(rows, known))
        for named, kind in ((self.top_kernels, "kernel"), (self.top_ops, "CPU operator (self time)")):
            if named:
                rows = [asdict(entry) | {"name": short_name(entry.name)} for entry in named]
                parts.append(table(rows, [Column("name", kind), *_NAMED_COLUMNS]))
        parts += [textwrap.fill(f"warning: {warning}", TERMINAL_WIDTH) + "\n" for warning in self.warnings]
        return "\n".join(parts)

    def _facts(self) -> list[tuple[str, Any, str]]:
        return [
            (f"window ({self.window})", f"{self.window_ms:.2f} ms", ""),
            ("one of them without the profiler (ms)", self.undisturbed_ms, ".2f"),
            ("kernel launches in the window", self.launches, "d"),
            ("kernels recorded in the window", self.kernels, "d"),
            ("launches per forward", self.launches_per_forward, ".0f"),
            ("launches per step", self.launches_per_step, ".0f"),
            ("GPU busy", self.gpu_busy_share, ".1%"),
            ("GPU idle", self.gpu_idle_share, ".1%"),
            ("GPU work / time without the profiler", self.undisturbed_gpu_share, ".1%"),
            ("CPU asking the GPU (dispatch)", self.dispatch_share, ".1%"),
            ("CPU waiting for the GPU", self.wait_share, ".1%"),
            ("communication kernels (ms)", self.communication_ms, ".3f"),
            ("communication beside compute", self.communication_overlap_share, ".1%"),
        ]


_RANGE_COLUMNS = (
    Column("name", "range"),
    Column("instances", "count", "d"),
    Column("wall_ms", "wall ms", ".3f"),
    Column("dispatch_ms", "dispatch ms", ".3f"),
    Column("dispatch_share", "dispatch", ".1%"),
    Column("wait_ms", "waiting ms", ".3f"),
    Column("gpu_ms", "GPU ms", ".3f"),
    Column("launches", "launches", ".0f"),
)
_NAMED_COLUMNS = (
    Column("calls", "calls", "d"),
    Column("total_ms", "ms", ".3f"),
    Column("share", "share", ".1%"),
)


def short_name(kernel: str) -> str:
    """At most 60 characters of a kernel's name, without the C++ namespaces that all of PyTorch's share."""
    return re.sub(r"^void |at::native::|\(anonymous namespace\)::", "", kernel)[:60]
