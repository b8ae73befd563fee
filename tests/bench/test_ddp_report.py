"""Rows of the data-parallel benches as tables, pictures and a report; traced steps as what ran beside what."""

from __future__ import annotations

import pytest
import torch

from lmkit.bench import ddp, ddp_overlap
from lmkit.bench.compare import compare_rows
from lmkit.bench.ddp_overlap import overlap_picture, read_step
from lmkit.bench.ddp_report import comparisons, ddp_result, ladder_markdown, megabytes, optimizer_result
from lmkit.bench.report import BenchResult
from lmkit.measure import plots
from lmkit.measure.limits import Limits
from lmkit.parallel.ranks import Ranks


def kernel(name: str, start: float, end: float) -> dict:
    return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": end - start}


def test_a_trace_is_read_as_what_ran_beside_what(monkeypatch):
    """Four steps of 100 us, shifted by 1000: two kernels that touch, one collective half beside them, one after. Of
    the third, the last but one, the second kernel is longer."""
    events = [
        {"ph": "M", "name": "process_name"},
        {"ph": "X", "cat": "cpu_op", "name": "nccl", "ts": 0, "dur": 9},
    ]
    for step in range(4):
        at = 1000 + 100 * step
        events += [kernel("matmul", at, at + 30), kernel("norm", at + 30, at + (70 if step == 2 else 60))]
        events += [
            kernel("ncclDevKernel_AllReduce", at + 40, at + 80),
            kernel("ncclDevKernel_AllReduce", at + 90, at + 100),
        ]
    step = read_step(events, 4)
    assert step is not None
    assert step.compute == [(0.0, 0.07)]
    assert step.communication == [(0.04, 0.08), (0.09, 0.1)]
    assert step.communication_ms == pytest.approx(0.05)
    assert step.beside_compute_ms == pytest.approx(0.03)
    assert overlap_picture(step, "bucketed").startswith(b"\x89PNG")
    labels = []
    monkeypatch.setattr(ddp_overlap, "timeline", lambda rows, **text: labels.append(text["x_label"]))
    overlap_picture(step, "bucketed")
    assert labels == ["time (ms), GPU of the traced rank"]
    assert read_step(events[:2], 4) is None
    with pytest.raises(ValueError, match="7 collectives in 4 steps"):
        read_step(events[:-1], 4)


def test_without_none_there_is_no_picture_of_what_is_exposed():
    timed = {
        "status": "ok",
        "step_ms": 10.0,
        "p10_ms": 9.0,
        "p90_ms": 11.0,
        "tokens_per_s": 1.0,
        "samples_ms": [10.0],
    }
    row, none = (
        {"case": "small", "contender": name, "world_size": 2} | timed for name in ("bucketed", "none")
    )
    ranks = Ranks(rank=0, local_rank=0, world_size=2, device=torch.device("cpu"))
    without, beside_none = (
        ddp_result(made, [], ranks).files for made in ([row], [none, row | {"exposed_ms": 1.0}])
    )
    assert "ddp_exposed.png" not in without
    assert "ddp_exposed.png" not in str(without["ddp_report.md"])
    assert "ddp_exposed.png" in beside_none
    assert f"{ddp.SETTLE_S:g} s of steps" in str(without["ddp_report.md"]), (
        "the legend says what is not timed"
    )
    assert "ddp_exposed.png" in str(beside_none["ddp_report.md"])


def test_pictures_of_times_have_whiskers_and_the_bucket_sizes_an_axis_from_zero(monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "png", lambda figure: figures.append(figure) or b"")

    def row(name: str, times: list[float]) -> dict:
        low, middle, high = times
        made = {"case": "small", "contender": name, "world_size": 2, "samples_ms": times, "step_ms": middle}
        return made | {"p10_ms": low, "p90_ms": high, "tokens_per_s": 1000 / middle}

    rows = [row("none", [7.0, 8.0, 9.0]), row("bucketed", [9.0, 10.0, 20.0]) | {"exposed_ms": 2.0}]
    sweep = [row("bucketed 1 MB", [9.0, 10.0, 12.0]), row("bucketed 10 MB", [9.9, 10.3, 11.0])]
    ddp_result(rows, sweep, Ranks(rank=0, local_rank=0, world_size=2, device=torch.device("cpu")))
    assert len(figures) == 3
    throughput, exposed, swept = (
        [
            [tuple(end[1] for end in segment) for segment in drawn.get_segments()]
            for drawn in figure.axes[0].collections
        ]
        for figure in figures
    )
    # From 1000 / p90 to 1000 / p10; then of 2, 2 and 11 ms from round to round; then the sizes' own.
    assert [whisker for (whisker,) in throughput] == [
        pytest.approx((1000 / 9, 1000 / 7)),
        pytest.approx((1000 / 20, 1000 / 9)),
    ]
    assert [whisker for (whisker,) in exposed] == [pytest.approx((2.0, 9.2))]
    assert [whisker for (whisker,) in swept] == [pytest.approx((9.0, 12.0)), pytest.approx((9.9, 11.0))]
    assert figures[2].axes[0].get_ylim()[0] == 0


def test_two_runs_of_the_ladder_can_be_compared():
    def result(step_ms: float, calls: int):
        def row(name: str) -> dict:
            times = {"step_ms": step_ms, "p10_ms": step_ms - 1, "p90_ms": step_ms + 1}
            of_one_rank = {"scaling": 10 / step_ms, "scaling_low": 0.1, "scaling_high": 1.0}
            row = {
                "case": "small",
                "contender": name,
                "world_size": 2,
                "status": "ok",
                "calls_per_step": calls,
            }
            return row | times | of_one_rank | {"tokens_per_s": 1.0, "samples_ms": [step_ms] * 20}

        ranks = Ranks(rank=0, local_rank=0, world_size=2, device=torch.device("cpu"))
        return ddp_result([row("none"), row("bucketed")], [row("none"), row("bucketed 1 MB")], ranks)

    before, after = result(20.0, 5), result(10.0, 4)
    compared = compare_rows(before.rows, after.rows)
    assert [row["verdict"] for row in compared.rows] == ["faster"] * 4
    assert [(row["before_ms"], row["after_ms"]) for row in compared.rows] == [(20, 10)] * 4
    assert [line.split()[0] for line in before.table().splitlines()[2:5]] == ["none", "bucketed", "bucketed"]


def test_the_report_sets_strategies_beside_their_rivals():
    def row(name: str, times: list[float]) -> dict:
        times_of_row = {"step_ms": times[0], "p10_ms": min(times), "p90_ms": max(times), "samples_ms": times}
        return {"case": "small", "contender": name, "world_size": 2, "status": "ok"} | times_of_row

    rows = [row("bucketed", [2.0] * 6), row("torch_ddp", [3.0] * 6), row("zero1", [2.0] * 6)]
    assert [(c["candidate"], c["baseline"], c["ratio"]) for c in comparisons(rows)] == [
        ("bucketed", "torch_ddp", 1.5)
    ]
    text = ladder_markdown(rows)
    assert "### small, 2 ranks (6 rounds)" in text
    assert "| bucketed | torch_ddp | 1.500 | 1.500 | 1.500 |" in text


def _timed(name: str, times: list[float], **more: object) -> dict:
    numbers = {"step_ms": times[0], "p10_ms": min(times), "p90_ms": max(times), "samples_ms": times}
    known = {"case": "small", "contender": name, "world_size": 2, "status": "ok", "tokens_per_s": 1.0}
    return known | numbers | {"scaling": 0.5, "scaling_low": 0.4, "scaling_high": 0.6} | more


def test_few_rounds_have_no_interval_and_the_table_says_that_time_was_up():
    def made(rounds: int) -> BenchResult:
        rows = [_timed(name, [2.0] * rounds) for name in ("bucketed", "torch_ddp")]
        return ddp_result(rows, [], Ranks(world_size=2), rounds=6)

    short, whole = made(1), made(6)
    report = str(short.files["ddp_report.md"])
    assert "(1 round)" in report
    assert "| 50.0% |" in report
    assert "| bucketed | torch_ddp | 1.000 | - | - |" in report
    for text in (report, " ".join(short.table().split())):
        assert "1 of 6 rounds: then bench.ddp.max_seconds was over" in text
        assert "fewer than 6 rounds have no 95% interval" in text
    assert "50.0% [40.0%, 60.0%]" in str(whole.files["ddp_report.md"])
    assert "max_seconds" not in whole.table()
    assert "95%" not in whole.table()


def test_what_only_gpus_have_is_neither_shown_nor_explained_without_them():
    ranks = Ranks(world_size=2)
    memory = {"peak_bytes": 1e9, "peak_overhead": 0.1, "host_ms": 1.0, "ahead_ms": 2.0}
    on_cpu, on_gpu = (ddp_result([_timed("bucketed", [2.0] * 6, **more)], [], ranks) for more in ({}, memory))
    for word in ("peak GB", "host ms", "ahead ms", "memory: peak"):
        assert word not in str(on_cpu.files["ddp_report.md"])
        assert word in str(on_gpu.files["ddp_report.md"])
    assert "memory" not in on_cpu.table()
    assert "memory: peak" in on_gpu.table()

    # The report has p10 and p90 themselves; the terminal's table, which has the spread, says what that is.
    assert "spread:" not in str(on_cpu.files["ddp_report.md"])
    assert "spread:" in on_cpu.table()
    for more, explained in (({"scaling": None}, False), ({}, True)):
        result = ddp_result([_timed("bucketed", [2.0] * 6, **more)], [], ranks)
        assert ("scaling: one rank" in str(result.files["ddp_report.md"])) == explained
        assert ("scaling: one rank" in " ".join(result.table().split())) == explained

    state = {"state_bytes": 8, "state_share": 1.0, "flops_per_token": 1.0, "precision": "fp32"}
    allocated = {"init_bytes": 1, "before_step_bytes": 2, "after_step_bytes": 3}
    limits = Limits("cpu", {"fp32": 1e12}, 1e10)
    plain, full = (
        optimizer_result([_timed("bucketed", [2.0] * 6, **state, **more)], [], ranks, limits)
        for more in ({}, allocated)
    )
    for word in ("init MB", "CUDA"):
        for text in (plain.table(), str(plain.files["optimizer_report.md"])):
            assert word not in text
        assert word in full.table()


@pytest.mark.parametrize(("rounds", "cells"), [(5, "| - | - |"), (6, "| 0.900 | 1.100 |")])
def test_an_update_alone_has_an_interval_of_rounds_enough_for_one(rounds, cells):
    row = _timed("zero1", [2.0] * 6, state_bytes=8, flops_per_token=1.0, precision="fp32")
    update = {"way": "operations", "update_ms": 1.0, "gb_per_s": 1.0, "host_ms": 1.0, "times_as_fast": 1.0}
    update |= {"low": 0.9, "high": 1.1, "samples_ms": [1.0] * rounds}
    result = optimizer_result([row], [update], Ranks(world_size=2), Limits("cpu", {"fp32": 1e12}, 1e10))
    assert cells in str(result.files["optimizer_report.md"])
    assert '"low": 0.9' in str(result.files["adamw_update_results.jsonl"])


def test_small_buffers_keep_their_size():
    sizes = {
        100: 0.0001,
        42_000: 0.042,
        260_000: 0.26,
        299_998: 0.3,
        999_424: 1.0,
        1_000_000: 1.0,
        25_600_000: 25.6,
    }
    assert {size: megabytes(size) for size in sizes} == sizes
