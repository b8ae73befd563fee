"""`lmkit bench all-reduce`: time and bandwidth of collectives over message sizes.

Bandwidths as NCCL's tests define them (see `NOTES`); the bus bandwidth does not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from lmkit.bench.context import Context
from lmkit.bench.harness import Measured
from lmkit.bench.trainings import samples_in_turns
from lmkit.errors import UsageError
from lmkit.measure.environment import describe_environment
from lmkit.measure.memory import release_memory
from lmkit.measure.plots import line_panels
from lmkit.measure.statistics import spread
from lmkit.measure.tables import Column, Rows
from lmkit.measure.timing import SteadyStateClock
from lmkit.recipe.tables import PositiveFloat, PositiveInt, Table
from lmkit.registry import BENCHES

if TYPE_CHECKING:
    import torch

    from lmkit.parallel.ranks import Ranks
    from lmkit.recipe.recipe import Recipe

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
    for size_mb, name in context.each("all-reduce", list(product(options.sizes_mb, options.dtypes))):
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[name]
        unit = 128 * ranks.world_size
        count = max(unit, int(size_mb * 1e6) // dtype.itemsize // unit * unit)
        flat = torch.randn(count, device=ranks.device).to(dtype)
        calls = {operation: _call(operation, flat, ranks) for operation in OPERATIONS}
        # A fixed number of calls: if each rank chose its own, ranks would wait for calls that never come.
        clock = SteadyStateClock(ranks.device, CALLS_PER_SAMPLE)
        samples = samples_in_turns(calls, context, lambda name: None, clock, rounds=options.repeats)
        found = [
            {"size_mb": size_mb} | _row(operation, name, flat.nbytes, ranks, samples_ms)
            for operation, samples_ms in samples.items()
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
    share_sent = (2 if operation == "all_reduce" else 1) * (ranks.world_size - 1) / ranks.world_size
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
        "bus_gb_per_s": share_sent * num_bytes / times.median / 1e6,
        "samples_ms": samples_ms,
    }


TITLE = "Collectives"
EACH = "backend"
BANDWIDTH = Column(
    "bus_gb_per_s", "bus GB/s", ".3g", axis="bus bandwidth (GB/s, 10^9 bytes)", better="higher"
)
COLUMNS = (
    Column("operation", "operation"),
    Column("backend", "backend"),
    Column("world_size", "ranks", "d"),
    Column("dtype", "dtype"),
    Column("bytes", "bytes", ",d"),
    Column("median_us", "us", ",.1f", instead="status", better="lower"),
    Column("spread", "spread", ".1%"),
    Column("algorithm_gb_per_s", "GB/s", ".3g"),
    BANDWIDTH,
)
NOTES = (
    "GB/s (10^9 bytes): buffer / time; bus GB/s: bytes that a rank must send / time, 2 (W-1)/W of the buffer for an "
    "all-reduce and (W-1)/W for the others",
)


def pictures(rows: Rows) -> dict[str, bytes]:
    """Draw bus bandwidth over the size, a panel per backend and number of ranks."""
    measured = [row | {"mb": float(f"{row['bytes'] / 1e6:.3g}")} for row in rows if row.get("median_us")]
    where: dict[str, Any] = {"group": "operation", "kind": "dtype", "title": TITLE}
    where["panel"] = lambda row: f"{row.get('backend', '')}, {row['world_size']} ranks"
    picture = line_panels(measured, "mb", BANDWIDTH, x_label="buffer (MB, 10^6 bytes)", **where)
    return {"all_reduce_bandwidth.png": picture}
