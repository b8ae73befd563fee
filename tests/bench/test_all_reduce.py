"""Worlds of `lmkit bench all-reduce`; what it times is tested in test_ddp.py."""

import pytest

from lmkit.bench import all_reduce as bench
from lmkit.bench.all_reduce import in_worlds, pictures
from lmkit.bench.summary import summary_of
from lmkit.recipe.load import load_recipe


def rows_of(backend, ranks):
    common = {"operation": "all_reduce", "backend": backend, "world_size": ranks, "dtype": "fp32"}
    return [
        common | {"bytes": size, "median_us": size / 1e3, "algorithm_gb_per_s": 1.0, "bus_gb_per_s": 1.5}
        for size in (10**5, 10**6, 10**7)
    ]


@pytest.mark.usefixtures("drawing")
def test_every_backend_runs_on_every_number_of_ranks_and_a_lack_of_gpus_is_a_row():
    started = []

    def start(recipe, nproc):
        started.append((recipe.parallel.backend, recipe.run.device, nproc))
        return rows_of("gloo", nproc), {"world_size": nproc, "cpu": {}}

    # No list: one world, as it is.
    assert in_worlds(load_recipe("bench_ddp_cpu"), 3, start)[1]["world_size"] == 3
    lists = {"bench.all_reduce.ranks": [2, 63], "bench.all_reduce.backends": ["gloo", "nccl"]}
    recipe = load_recipe("bench_ddp_cpu", flags=lists)
    rows, environment = in_worlds(recipe, 1, start)
    assert started[1:3] == [("gloo", "cpu", 2), ("gloo", "cpu", 63)]
    assert "world_size" not in environment
    (missing,) = (row for row in rows if row["backend"] == "nccl" and row["world_size"] == 63)
    assert missing["status"] == "unsupported"  # no machine has 63 GPUs
    summary = summary_of(bench, rows)
    assert summary.measured
    assert list(summary.not_measured) == [f"unsupported: {missing['detail']}"]
    assert set(pictures(rows)) == {"all_reduce_bandwidth.png"}
