"""`lmkit bench all-reduce`: how long collectives take from 1 MB to 1 GB, and what bandwidth that is.

Bus bandwidth as NCCL's tests define it: bytes that cross each rank's link per second, which does not depend on
the number of ranks: 2 (W-1)/W of the buffer for an all-reduce, (W-1)/W for reduce-scatter and all-gather.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lmkit.bench.ddp_clock import SteadyStateClock, of_slowest_rank
from lmkit.bench.journal import Journal
from lmkit.measure.memory import release_memory
from lmkit.measure.progress import Progress
from lmkit.measure.statistics import spread
from lmkit.measure.timing import time_variants
from lmkit.parallel.collectives import Averager, Traffic, agree
from lmkit.parallel.ranks import Ranks

MEGABYTE = 10**6
SIZES_MB = (1, 4, 16, 25, 64, 256, 1000)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CALLS_PER_SAMPLE = 4
"""Timed, after half as many that are not."""
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")


def all_reduce_rows(
    ranks: Ranks,
    *,
    sizes_mb: Sequence[float] = SIZES_MB,
    dtypes: Sequence[str] = ("fp32", "bf16"),
    operations: Sequence[str] = OPERATIONS,
    repeats: int = 10,
    progress: Progress | None = None,
    journal: Journal | None = None,
) -> list[dict[str, Any]]:
    """One row per operation, dtype and size (MB = 10^6 bytes of the whole buffer); every rank calls this.

    Times are the slowest rank's, per round, in ms per call; random data. The first rank keeps them in `journal`.
    """
    rows: list[dict[str, Any]] = []
    for size_mb in sizes_mb:
        for dtype_name in dtypes:
            if progress is not None and ranks.is_first:
                progress("all-reduce", len(rows) // len(operations), len(sizes_mb) * len(dtypes))
            dtype = DTYPES[dtype_name]
            unit = 128 * ranks.world_size
            count = max(unit, int(size_mb * MEGABYTE) // dtype.itemsize // unit * unit)
            flat = torch.randn(count, device=ranks.device).to(dtype)
            works = {operation: _work(operation, flat, ranks) for operation in operations}
            timings = time_variants(
                works,
                device=ranks.device,
                repeats=repeats,
                warmup=3,
                # A fixed number of calls: a clock that adapts them on each rank would leave ranks waiting.
                clock=SteadyStateClock(ranks.device, CALLS_PER_SAMPLE),
                prepare={operation: (lambda: agree(ranks)) for operation in operations},
            )
            for operation, timing in timings.items():
                slowest = of_slowest_rank(timing.samples_ms, ranks)
                rows.append(_row(operation, dtype_name, flat.nbytes, ranks, slowest))
            if journal is not None and ranks.is_first:
                journal.add(rows[-len(operations) :])
            del flat, works
            release_memory(ranks.device)
    return rows


def _work(operation: str, flat: torch.Tensor, ranks: Ranks) -> Callable[[], object]:
    averager = Averager(ranks, Traffic())
    start: Callable[[Any], Any] = getattr(averager, operation)
    return lambda: start([flat] if operation == "all_reduce" else flat).wait()


def _row(operation: str, dtype: str, num_bytes: int, ranks: Ranks, samples_ms: list[float]) -> dict[str, Any]:
    summary = spread(samples_ms)
    passes = 2 if operation == "all_reduce" else 1
    assert dist.group.WORLD is not None
    link_bytes = passes * (ranks.world_size - 1) / ranks.world_size * num_bytes
    return {
        "operation": operation,
        "backend": dist.group.WORLD._get_backend(ranks.device).name(),
        "world_size": ranks.world_size,
        "dtype": dtype,
        "bytes": num_bytes,
        "median_us": summary.median * 1e3,
        "p10_us": summary.p10 * 1e3,
        "p90_us": summary.p90 * 1e3,
        "algorithm_gb_per_s": num_bytes / summary.median / 1e6,
        "bus_gb_per_s": link_bytes / summary.median / 1e6,
        "samples_ms": samples_ms,
    }
