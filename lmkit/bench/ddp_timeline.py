"""One training step on several GPUs, from a trace: when its kernels compute and when they communicate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from lmkit.measure.ranges import quietly
from lmkit.measure.statistics import clip, union
from lmkit.measure.trace import DeviceWork

if TYPE_CHECKING:
    from lmkit.parallel.ranks import Ranks
    from lmkit.training.setup import TrainingStep

TRACE_WARMUP = 5
TRACE_STEPS = 16  # in the first traced steps the host is not yet ahead of its GPU
Timeline = dict[str, list[tuple[float, float]]]
""""compute" or "communication" -> when its kernels ran: (start, end) in ms since the step's start, merged."""


def trace_step(built: TrainingStep, ranks: Ranks) -> Timeline | None:
    """Trace steps (every rank calls this, on GPUs) and return the last but one; None on ranks other than 0.

    Only rank 0 is traced. Tracing slows down its host, so the other ranks wait for rank 0, and the traced time of its
    collectives contains no waiting.
    """
    import torch

    from lmkit.measure.kineto import chrome_trace, parse_chrome_trace
    from lmkit.parallel.collectives import agree

    for _ in range(TRACE_WARMUP):
        built.run()
    torch.cuda.synchronize(ranks.device)
    agree(ranks)
    tracing = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    with quietly(tracing) if ranks.is_first else nullcontext() as profiler:
        for _ in range(TRACE_STEPS):
            built.run()
        torch.cuda.synchronize(ranks.device)
    if profiler is None:
        return None
    trace = parse_chrome_trace(json.loads(chrome_trace(profiler)), "bench ddp")
    return read_step(trace.work or (), TRACE_STEPS)


def read_step(work: Sequence[DeviceWork], steps: int) -> Timeline | None:
    """Return the last but one of `steps` steps; None without collectives (the profiler may not be allowed to see
    kernels).

    A step begins at the end of the previous step's last collective and ends at the end of its own.

    Raises:
        ValueError: the steps did not make equally many collectives.
    """
    spans: dict[str, list[tuple[int, int]]] = {"compute": [], "communication": []}
    for item in work:
        spans["communication" if item.is_communication else "compute"].append((item.start, item.end))
    collectives = sorted(spans["communication"])
    if not collectives:
        return None
    if len(collectives) % steps:
        raise ValueError(f"{len(collectives)} collectives in {steps} steps: not the same number in each")
    per_step = len(collectives) // steps
    begin, finish = (max(end for _, end in collectives[: n * per_step]) for n in (steps - 2, steps - 1))
    return {
        kind: [
            ((start - begin) / 1e6, (end - begin) / 1e6) for start, end in union(clip(of_kind, begin, finish))
        ]
        for kind, of_kind in spans.items()
    }
