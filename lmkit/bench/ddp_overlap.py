"""What runs beside what in a step: a kineto trace of one contender, read as two rows of intervals."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lmkit.bench.ddp_contenders import DdpCase, contender
from lmkit.measure.memory import release_memory
from lmkit.measure.plots import timeline
from lmkit.measure.ranges import quietly
from lmkit.measure.statistics import clip, overlap, total, union
from lmkit.parallel.collectives import agree
from lmkit.parallel.ranks import Ranks

Interval = tuple[float, float]
WARMUP = 5
STEPS = 16
"""Traced: tracing begins with a host that is not ahead of its GPU, and shows its gaps until it is."""
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class StepTimeline:
    """One step on the GPU, from the end of the step before's last collective to the end of its own.

    Attributes:
        compute, communication: when kernels ran, (start, end) in ms since the step's start, joined where they touch.
    """

    compute: list[Interval]
    communication: list[Interval]

    @property
    def communication_ms(self) -> float:
        """How long a collective was running, waiting for other ranks included."""
        return total(self.communication)

    @property
    def beside_compute_ms(self) -> float:
        """How much of that while another kernel was running too."""
        return overlap(self.communication, self.compute)


def record_step(name: str, case: DdpCase, ranks: Ranks) -> StepTimeline | None:
    """Trace steps of a contender (every rank calls this, on GPUs); the last but one of them, None on other ranks
    than 0.

    Rank 0 alone is traced. That slows down its host, so it is the one that the others wait for: what its collectives
    take is not spent waiting.
    """
    built = contender(name, case, ranks)
    for _ in range(WARMUP):
        built.step()
    torch.cuda.synchronize(ranks.device)
    agree(ranks)
    tracing = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    with quietly(tracing) if ranks.is_first else nullcontext() as profiler:
        for _ in range(STEPS):
            built.step()
        torch.cuda.synchronize(ranks.device)
    del built
    release_memory(ranks.device)
    if profiler is None:
        return None
    with tempfile.TemporaryDirectory(prefix="lmkit-trace-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_step(json.loads(path.read_text("utf-8"))["traceEvents"], STEPS)


def read_step(events: Sequence[dict[str, Any]], steps: int) -> StepTimeline | None:
    """The last but one of `steps` steps in the events of a Chrome trace (times in us); None if it has no collective
    (the profiler may not be allowed to see kernels).

    Raises:
        ValueError: the steps did not make equally many collectives.
    """
    spans = [
        ("nccl" in event["name"].lower(), event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("ph") == "X" and event.get("cat") in ON_DEVICE
    ]
    collectives = sorted((start, end) for communicates, start, end in spans if communicates)
    if not collectives:
        return None
    if len(collectives) % steps:
        raise ValueError(f"{len(collectives)} collectives in {steps} steps: not the same number in each")
    per_step = len(collectives) // steps
    begin, finish = (max(end for _, end in collectives[: n * per_step]) for n in (steps - 2, steps - 1))

    def inside(communicates: bool) -> list[Interval]:
        of_kind = [(start, end) for kind, start, end in spans if kind is communicates]
        return [
            ((start - begin) / 1e3, (end - begin) / 1e3) for start, end in union(clip(of_kind, begin, finish))
        ]

    return StepTimeline(compute=inside(False), communication=inside(True))


def overlap_picture(step: StepTimeline, name: str) -> bytes:
    """The step as a PNG: compute above communication, on one axis."""
    return timeline(
        {"compute": step.compute, "communication": step.communication},
        title=f"{name}: {step.communication_ms:.2f} ms of communication in a step, "
        f"{step.beside_compute_ms:.2f} of them beside compute",
        x_label="time (ms), GPU of the traced rank",
    )
