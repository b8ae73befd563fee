"""Worlds and lines of `lmkit bench all-reduce`; what it times is tested in test_ddp.py."""

import pytest

from lmkit.bench.all_reduce import fitted_line, in_worlds, pictures, summarize, with_lines
from lmkit.recipe.load import load_recipe

SIZES = (1e5, 1e6, 1e7)


def rows_of(backend, ranks, latency, per_byte):
    """All-reduces whose time in us is latency + bytes * per_byte."""
    return [
        {
            "operation": "all_reduce",
            "backend": backend,
            "world_size": ranks,
            "dtype": "fp32",
            "bytes": size,
            "size_mb": size / 1e6,
            "median_us": latency + size * per_byte,
            "algorithm_gb_per_s": size / (latency + size * per_byte) / 1e3,
            "bus_gb_per_s": 2 * (ranks - 1) / ranks * size / (latency + size * per_byte) / 1e3,
        }
        for size in SIZES
    ]


@pytest.mark.usefixtures("drawing")
def test_every_backend_runs_on_every_number_of_ranks_and_a_lack_of_gpus_is_a_row():
    started = []

    def start(recipe, nproc):
        started.append((recipe.parallel.backend, recipe.run.device, nproc))
        return rows_of("gloo", nproc, 10, 1e-3), {"world_size": nproc, "cpu": {}}

    # No list: one world, as it is.
    assert in_worlds(load_recipe("bench_ddp_cpu"), 3, start)[1]["world_size"] == 3
    lists = {"bench.all_reduce.ranks": [2, 63], "bench.all_reduce.backends": ["gloo", "nccl"]}
    recipe = load_recipe("bench_ddp_cpu", flags=lists)
    rows, environment = in_worlds(recipe, 1, start)
    assert started[1:3] == [("gloo", "cpu", 2), ("gloo", "cpu", 63)]
    assert "world_size" not in environment
    (missing,) = (row for row in rows if row["backend"] == "nccl" and row["world_size"] == 63)
    assert missing["status"] == "unsupported"  # no machine has 63 GPUs
    summary = summarize(rows)
    assert summary.measured
    assert list(summary.not_measured) == [f"unsupported: {missing['detail']}"]
    assert set(pictures(rows)) == {"all_reduce_bandwidth.png", "all_reduce_time.png"}


def test_the_line_has_the_latency_and_the_bandwidth_of_each_kind():
    rows = rows_of("gloo", 4, 100.0, 1e-3) + rows_of("nccl", 2, 20.0, 4e-6)
    told, lines = with_lines(rows)
    assert [row["line_us"] for row in told] == pytest.approx([row["median_us"] for row in rows])
    assert [(line["backend"], line["world_size"]) for line in lines] == [("gloo", 4), ("nccl", 2)]
    assert [line["latency_us"] for line in lines] == pytest.approx([100, 20])
    assert [line["line_gb_per_s"] for line in lines] == pytest.approx([1.0, 250.0])
    assert [line["line_bus_gb_per_s"] for line in lines] == pytest.approx([1.5, 250.0])
    assert lines[0]["off"] == pytest.approx(0, abs=1e-9)


def test_a_line_counts_relative_errors_and_has_no_negative_latency():
    points = [(size, 10 + 1e-3 * size) for size in (1e3, 1e4, 1e5)]
    # One time is off, and longer than all others.
    latency, per_byte = fitted_line([*points, (1e6, 1.3 * 1010)])
    assert latency == pytest.approx(10, rel=0.05)  # by absolute errors it would be -0.9
    assert per_byte == pytest.approx(1e-3, rel=0.2)
    # The line would meet the axis at -0.5. Through the origin: x = size / time is 2000 and 1000, sum x / sum x^2.
    assert fitted_line([(1e3, 0.5), (1e6, 1000.0)]) == pytest.approx((0.0, 6e-4))
    assert fitted_line([(1e3, 5.0), (1e3, 6.0)]) is None
