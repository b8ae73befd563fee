"""`lmkit bench all-reduce`: time of collectives over message sizes, and the bandwidth that it amounts to.

Bus bandwidth as NCCL's tests define it: bytes that cross each rank's link per second. It does not depend on the
number of ranks: 2 (W-1)/W of the buffer for an all-reduce, (W-1)/W for reduce-scatter and all-gather.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from lmkit.bench.context import Context
from lmkit.bench.harness import Summary
from lmkit.bench.pictures import lines
from lmkit.measure.memory import release_memory
from lmkit.measure.statistics import spread
from lmkit.measure.tables import Column, Rows
from lmkit.measure.timing import SteadyStateClock, time_variants
from lmkit.recipe.tables import PositiveFloat, PositiveInt, Table
from lmkit.registry import BENCHES

if TYPE_CHECKING:
    import torch

    from lmkit.parallel.ranks import Ranks

CALLS_PER_SAMPLE = 4
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")


class Options(Table):
    """`[bench.all_reduce]`."""

    sizes_mb: tuple[PositiveFloat, ...] = (1, 4, 16, 25, 64)
    """Sizes of the whole buffer, in 10^6 bytes."""
    dtypes: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16")
    """Dtypes of the buffer."""
    repeats: PositiveInt = 10
    """Samples of each size."""


@BENCHES.register(
    "all_reduce",
    order=6,
    help="all-reduce, reduce-scatter and all-gather over message sizes.",
    recipes=("bench_ddp", "bench_ddp_cpu"),
    ranks="required",
    example="lmkit bench all-reduce bench_ddp_cpu --nproc 2",
    row_keys=("operation", "dtype", "world_size", "bytes", "bus_gb_per_s"),
)
def all_reduce(context: Context) -> Rows:
    """Return one row per operation, dtype and size. Times are the slowest rank's, per round, on random data."""
    import torch

    from lmkit.parallel.collectives import agree

    options, ranks = context.options, context.ranks
    rows: Rows = []
    for size_mb in options.sizes_mb:
        for name in options.dtypes:
            context.progress(
                "all-reduce", len(rows) // len(OPERATIONS), len(options.sizes_mb) * len(options.dtypes)
            )
            dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[name]
            unit = 128 * ranks.world_size
            count = max(unit, int(size_mb * 1e6) // dtype.itemsize // unit * unit)
            flat = torch.randn(count, device=ranks.device).to(dtype)
            timings = time_variants(
                {operation: _call(operation, flat, ranks) for operation in OPERATIONS},
                device=ranks.device,
                repeats=options.repeats,
                warmup=3,
                # A fixed number of calls: if each rank adapted its own, others would wait for calls that never come.
                clock=SteadyStateClock(ranks.device, CALLS_PER_SAMPLE),
                prepare={operation: (lambda: agree(ranks)) for operation in OPERATIONS},
            )
            found = [
                _row(operation, name, flat.nbytes, ranks, context.slowest_rank(timing.samples_ms))
                for operation, timing in timings.items()
            ]
            rows += found
            context.keep(found)
            del flat
            release_memory(ranks.device)
    return rows


def _call(operation: str, flat: torch.Tensor, ranks: Ranks) -> Callable[[], object]:
    from lmkit.parallel.collectives import Averager, Traffic

    start: Callable[[Any], Any] = getattr(Averager(ranks, Traffic()), operation)
    return lambda: start([flat] if operation == "all_reduce" else flat).wait()


def _row(operation: str, dtype: str, num_bytes: int, ranks: Ranks, samples_ms: list[float]) -> dict[str, Any]:
    import torch.distributed as dist

    times = spread(samples_ms)
    passes = 2 if operation == "all_reduce" else 1
    link_bytes = passes * (ranks.world_size - 1) / ranks.world_size * num_bytes
    assert dist.group.WORLD is not None
    return {
        "operation": operation,
        "backend": dist.group.WORLD._get_backend(ranks.device).name(),
        "world_size": ranks.world_size,
        "dtype": dtype,
        "bytes": num_bytes,
        "median_us": times.median * 1e3,
        "p10_us": times.p10 * 1e3,
        "p90_us": times.p90 * 1e3,
        "spread": times.relative,
        "algorithm_gb_per_s": num_bytes / times.median / 1e6,
        "bus_gb_per_s": link_bytes / times.median / 1e6,
        "samples_ms": samples_ms,
    }


# Rows in words

COLUMNS = (
    Column("operation", "operation"),
    Column("dtype", "dtype"),
    Column("world_size", "ranks", "d"),
    Column("bytes", "bytes", ",d"),
    Column("median_us", "us", ",.1f"),
    Column("spread", "spread", ".1%"),
    Column("bus_gb_per_s", "bus GB/s", ".2f"),
)


def summarize(rows: Rows) -> Summary:
    """Say what the rows support: the highest bandwidth, the shortest call."""
    fastest = max(rows, key=lambda row: row["bus_gb_per_s"])
    shortest = min(rows, key=lambda row: row["median_us"])
    return Summary(
        "Collectives",
        COLUMNS,
        rows,
        findings=(
            f"Highest bus bandwidth: {fastest['operation']} of {fastest['bytes'] / 1e6:,.4g} MB "
            f"{fastest['dtype']} on {fastest['world_size']} ranks, {fastest['bus_gb_per_s']:.1f} GB/s.",
            f"A call takes at least {shortest['median_us']:.0f} us ({shortest['operation']}, "
            f"{shortest['bytes']:,} bytes): many small calls cost that much each.",
        ),
        notes=(
            "bus GB/s (10^9 bytes): what a rank must send, 2 (W-1)/W of the buffer for an all-reduce and (W-1)/W for "
            "the others, divided by the time; MB: 10^6 bytes",
        ),
    )


def pictures(rows: Rows) -> dict[str, bytes]:
    """Draw bandwidth over message size."""
    picture = lines(
        [row | {"mb": float(f"{row['bytes'] / 1e6:.3g}")} for row in rows],
        "mb",
        "bus_gb_per_s",
        series=lambda row: f"{row['operation']} {row['dtype']}",
        title=f"Collectives on {rows[0]['world_size']} ranks",
        x_label="buffer (MB, 10^6 bytes)",
        y_label="bus bandwidth (GB/s, 10^9 bytes)",
    )
    return {"all_reduce_bandwidth.png": picture}
