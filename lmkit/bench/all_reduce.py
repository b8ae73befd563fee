"""`lmkit bench all-reduce`: time and bandwidth of collectives over message sizes.

Bandwidths as NCCL's tests define them. Algorithm bandwidth: bytes of the buffer per second. Bus bandwidth: bytes that
cross each rank's link per second, which does not depend on the number of ranks: 2 (W-1)/W of the buffer for an
all-reduce, (W-1)/W for reduce-scatter and all-gather.

The time of n bytes is about latency + n / bandwidth (Hockney 1994); `fitted_line` finds both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from lmkit.bench.context import Context
from lmkit.bench.harness import Measured, grouped
from lmkit.bench.summary import MEASURED, Summary
from lmkit.bench.trainings import samples_in_turns, slowest
from lmkit.errors import UsageError
from lmkit.measure.environment import describe_environment
from lmkit.measure.memory import release_memory
from lmkit.measure.plots import line_panels
from lmkit.measure.statistics import spread
from lmkit.measure.tables import Column, Rows, markdown_table
from lmkit.measure.timing import SteadyStateClock
from lmkit.recipe.tables import PositiveFloat, PositiveInt, Table
from lmkit.registry import BENCHES

if TYPE_CHECKING:
    import torch

    from lmkit.parallel.ranks import Ranks
    from lmkit.recipe.schema import Recipe

CALLS_PER_SAMPLE = 4
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")


class Options(Table):
    """`[bench.all_reduce]`."""

    ranks: tuple[Annotated[int, Field(ge=2, le=64)], ...] = ()
    """Numbers of ranks to start, one after the other; replaces --nproc."""
    backends: tuple[Literal["gloo", "nccl"], ...] = ()
    """gloo between CPUs, nccl between GPUs; empty: `parallel.backend`."""
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
    example="lmkit bench all-reduce bench_ddp_cpu --ranks 2,4 --backends gloo,nccl",
    row_keys=("operation", "dtype", "world_size", "bytes", "bus_gb_per_s"),
)
def all_reduce(context: Context) -> Rows:
    """Return one row per operation, dtype and size. A time is the slowest rank's in a round, in ms."""
    import torch

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
            calls = {operation: _call(operation, flat, ranks) for operation in OPERATIONS}
            # A fixed number of calls: if each rank chose its own, ranks would wait for calls that never come.
            clock = SteadyStateClock(ranks.device, CALLS_PER_SAMPLE)
            samples = samples_in_turns(calls, context, lambda name: None, clock, rounds=options.repeats)
            found = [
                {"size_mb": size_mb} | _row(operation, name, flat.nbytes, ranks, slowest(rounds))
                for operation, rounds in samples.items()
            ]
            rows += found
            context.keep(found)
            del flat
            release_memory(ranks.device)
    return rows


def in_worlds(recipe: Recipe, nproc: int, start: Callable[[Recipe, int], Measured | None]) -> Measured | None:
    """Run every backend on every number of ranks. A combination that needs more GPUs than there are becomes a row."""
    from lmkit.parallel.ranks import local_device

    options = recipe.bench_table("all_reduce")
    if not options.ranks and not options.backends:
        return start(recipe, nproc)
    rows: Rows = []
    environment: dict[str, Any] = {}
    for backend, ranks in product(options.backends or (recipe.parallel.backend,), options.ranks or (nproc,)):
        device = {"gloo": "cpu", "nccl": "cuda"}.get(backend, recipe.run.device)
        try:
            local_device(device, local_rank=ranks - 1)
        except UsageError as error:
            lack = {"status": "unsupported", "detail": error.message}
            rows.append({"operation": "all_reduce", "backend": backend, "world_size": ranks} | lack)
            continue
        changed = recipe.changed(run={"device": device}, parallel={"backend": backend})
        if (measured := start(changed, ranks)) is not None:
            rows += measured[0]
            environment = measured[1]
    environment.pop("world_size", None)  # the rows have several
    return rows, environment or describe_environment()


def _call(operation: str, flat: torch.Tensor, ranks: Ranks) -> Callable[[], object]:
    from lmkit.parallel.collectives import Averager, Traffic

    start: Callable[[Any], Any] = getattr(Averager(ranks, Traffic()), operation)
    return lambda: start([flat] if operation == "all_reduce" else flat).wait()


def _row(operation: str, dtype: str, num_bytes: int, ranks: Ranks, samples_ms: list[float]) -> dict[str, Any]:
    import torch.distributed as dist

    times = spread(samples_ms)
    link_bytes = _bus_share(operation, ranks.world_size) * num_bytes
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


def _bus_share(operation: str, world_size: int) -> float:
    """Return the bytes that a rank must send, as a share of the buffer."""
    return (2 if operation == "all_reduce" else 1) * (world_size - 1) / world_size


# Rows in words

BANDWIDTH = Column("bus_gb_per_s", "bus GB/s", ".3g", axis="bus bandwidth (GB/s, 10^9 bytes)")
COLUMNS = (
    Column("operation", "operation"),
    Column("backend", "backend"),
    Column("world_size", "ranks", "d"),
    Column("dtype", "dtype"),
    Column("bytes", "bytes", ",d"),
    Column("median_us", "us", ",.1f", instead="status"),
    Column("spread", "spread", ".1%"),
    Column("algorithm_gb_per_s", "GB/s", ".3g"),
    BANDWIDTH,
    Column("line_us", "line us", ",.1f"),
)
LINE_COLUMNS = (
    *COLUMNS[:4],
    Column("latency_us", "latency us", ",.1f"),
    Column("line_gb_per_s", "GB/s", ".3g"),
    Column("line_bus_gb_per_s", "bus GB/s", ".3g"),
    Column("off", "farthest point", ".0%"),
)


def fitted_line(points: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Return (latency, time per byte) of the line with the least squares of relative errors; None for one size.

    Least squares of absolute errors would not determine the latency: errors at the largest sizes exceed it.

    Args:
        points: (bytes, time).
    """
    import numpy as np

    sizes, times = np.array(points, dtype=float).T
    if len(set(sizes)) < 2:
        return None
    latency, per_byte = np.linalg.lstsq(np.stack([1 / times, sizes / times], 1), np.ones(len(times)))[0]
    if latency < 0:  # then take the best line through the origin
        latency, per_byte = 0.0, (sizes / times).sum() / (sizes / times).dot(sizes / times)
    return float(latency), float(per_byte)


def with_lines(rows: Rows) -> tuple[Rows, Rows]:
    """Return the rows with the time that the fitted line predicts, and a row for each line."""
    keys = [column.key for column in COLUMNS[:4]]
    fitted: dict[Any, tuple[float, float]] = {}
    lines: Rows = []
    for key, members in grouped(rows, lambda row: tuple(row.get(key) for key in keys)).items():
        measured = [row for row in members if row.get("median_us") is not None]
        line = fitted_line([(row["bytes"], row["median_us"]) for row in measured]) if measured else None
        if line is None or line[1] <= 0:
            continue
        fitted[key] = line
        offs = [
            abs(line[0] + row["bytes"] * line[1] - row["median_us"]) / row["median_us"] for row in measured
        ]
        rate = 1e-3 / line[1]  # bytes per us -> 10^9 bytes per second
        crossing = _bus_share(members[0]["operation"], members[0]["world_size"])
        values = {"latency_us": line[0], "line_gb_per_s": rate, "line_bus_gb_per_s": rate * crossing}
        lines.append(dict(zip(keys, key, strict=True)) | values | {"off": max(offs)})
    told = []
    for row in rows:
        line = fitted.get(tuple(row.get(key) for key in keys))
        told.append(row | ({"line_us": line[0] + row["bytes"] * line[1]} if line and "bytes" in row else {}))
    return told, lines


def summarize(rows: Rows) -> Summary:
    """Say what the rows support: the highest bandwidth, the shortest call, and the lines through the sizes."""
    measured = [row for row in rows if row.get("status") in MEASURED]
    told, lines = with_lines(rows)
    findings: list[str] = []
    for backend, of_backend in grouped(measured, lambda row: row.get("backend", "the backend")).items():
        fastest = max(of_backend, key=lambda row: row["bus_gb_per_s"])
        shortest = min(of_backend, key=lambda row: row["median_us"])
        findings += [
            f"Highest bus bandwidth of {backend}: {fastest['operation']} of {fastest['bytes'] / 1e6:,.4g} MB "
            f"{fastest['dtype']} on {fastest['world_size']} ranks, {fastest['bus_gb_per_s']:.1f} GB/s.",
            f"A call of {backend} takes at least {shortest['median_us']:.0f} us ({shortest['operation']}, "
            f"{shortest['bytes']:,} bytes): many small calls cost that much each.",
        ]
    return Summary(
        "Collectives",
        COLUMNS,
        told,
        findings=findings,
        tables={"Time = latency + bytes / bandwidth": markdown_table(lines, LINE_COLUMNS)} if lines else {},
        notes=(
            "GB/s (10^9 bytes): buffer / time; bus GB/s: bytes that a rank must send / time, 2 (W-1)/W of the buffer "
            "for an all-reduce and (W-1)/W for the others; MB: 10^6 bytes",
            *(["line: latency + bytes / bandwidth, fitted to one operation and dtype"] if lines else []),
        ),
    )


def pictures(rows: Rows) -> dict[str, bytes]:
    """Draw bus bandwidth over the size; and the times of all-reduces with their lines, a panel per backend."""
    measured = [
        {"size_mb": float(f"{row['bytes'] / 1e6:.3g}")} | row for row in rows if row.get("status") in MEASURED
    ]
    if not measured:
        return {}
    worlds = {(row.get("backend"), row["world_size"]) for row in measured}
    shown = measured if len(worlds) == 1 else [row for row in measured if row["operation"] == "all_reduce"]
    what = "Collectives" if len(worlds) == 1 else "all_reduce"
    where: dict[str, Any] = {"x": "size_mb", "x_label": "buffer (MB, 10^6 bytes)"}
    bandwidth = line_panels(
        shown,
        column=BANDWIDTH,
        group=lambda row: (
            f"{row['operation']} {row['dtype']}"
            if len(worlds) == 1
            else f"{row['backend']}, {row['world_size']} ranks, {row['dtype']}"
        ),
        title=f"{what} on {' and '.join(str(n) for n in sorted({n for _, n in worlds}))} ranks",
        log_y=len({backend for backend, _ in worlds}) > 1,
        **where,
    )
    times = line_panels(
        [
            {**row, "kind": kind, "ms": row[key] / 1e3}
            for row in with_lines([row for row in measured if row["operation"] == "all_reduce"])[0]
            for kind, key in (("measured", "median_us"), ("line", "line_us"))
            if key in row
        ],
        column=Column("ms", "time (ms)"),
        panel=lambda row: f"{row.get('backend', '')}, {row['world_size']} ranks",
        group="dtype",
        kind="kind",
        title="all_reduce: latency + bytes / bandwidth",
        log_y=True,
        **where,
    )
    return {"all_reduce_bandwidth.png": bandwidth, "all_reduce_time.png": times}
