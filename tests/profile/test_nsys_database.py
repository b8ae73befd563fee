import pytest

from lmkit.errors import LmkitError, UsageError
from lmkit.profile.nsys import read_nsys_database, read_nsys_file
from lmkit.profile.summary import summarize


def test_the_answers_of_a_recording_worked_by_hand(two_steps):
    summary = summarize(read_nsys_database(two_steps.path))
    assert summary.engine == "nsys"
    assert summary.source == "report.sqlite"
    assert summary.steps == 1  # the first is skipped
    assert summary.window_ms == 1.0
    assert summary.launches == 4
    assert summary.kernels == 4
    assert summary.launches_per_forward == 2
    assert summary.launches_per_step == 4
    # 200-350 and 500-790 (gemm 500-700, copy 700-710, nccl 610-790) of 1000
    assert summary.gpu_busy_share == pytest.approx((150 + 290) / 1000)
    assert summary.gpu_idle_share == pytest.approx(1 - 0.44)
    # 10 + 10 + 20 + 5 + 10 of 1000; nothing waits, the copy is asynchronous
    assert summary.dispatch_share == pytest.approx(0.055)
    assert summary.wait_share == 0.0
    assert summary.communication_ms == pytest.approx(0.180)
    assert summary.communication_overlap_share == pytest.approx((700 - 610 + 10) / 180)  # gemm, then the copy
    by_name = {entry.name: entry for entry in summary.ranges}
    forward, backward = by_name["lmkit.forward"], by_name["lmkit.backward"]
    assert (forward.instances, forward.wall_ms, forward.launches) == (1, 0.2, 2)
    assert forward.dispatch_ms == pytest.approx(0.020)
    assert forward.gpu_ms == pytest.approx(0.150)
    assert forward.dispatch_share == pytest.approx(0.1)
    # launched by another thread, and still backward's own
    assert (backward.launches, backward.dispatch_ms) == (2, pytest.approx(0.035))
    assert backward.gpu_ms == pytest.approx(0.290)
    assert [(top.name, top.calls) for top in summary.top_kernels] == [
        ("gemm", 3),
        ("ncclAllReduce", 1),
        ("memcpy", 1),
    ]
    assert summary.top_kernels[0].share == pytest.approx(400 / 590)
    assert summary.warnings == ()


def test_all_steps_count_if_asked(two_steps):
    summary = summarize(read_nsys_database(two_steps.path), skip_steps=0)
    assert (summary.steps, summary.launches, summary.window_ms) == (2, 8, 2.0)
    assert {entry.name: entry.dispatch_ms for entry in summary.ranges}["lmkit.forward"] == pytest.approx(
        0.030
    )


def test_the_first_step_of_every_process_is_its_warm_up(nsys_database):
    for process in (77, 78):
        for begin in (0, 1000, 2000):
            nsys_database.range(begin + process, begin + 900, text="step", tid=(process << 24) | 1)
    summary = summarize(read_nsys_database(nsys_database.path))
    assert (summary.steps, summary.window_ms) == (4, (2900 - 1077) / 1e6)


def test_a_recording_without_ranges_says_so(nsys_database):
    nsys_database.call("cudaLaunchKernel_v7000", 10, 20, 1)
    nsys_database.kernel("gemm", 50, 60, 1)
    (warning,) = summarize(read_nsys_database(nsys_database.path)).warnings
    assert "no NVTX ranges" in warning


def test_a_thread_local_range_does_not_count_another_threads_launches(nsys_database):
    nsys_database.range(0, 1000, text="forward")
    nsys_database.call("cudaLaunchKernel_v7000", 10, 20, 1)
    nsys_database.call("cudaLaunchKernel_v7000", 30, 40, 2, tid=(77 << 24) | 9)
    nsys_database.kernel("gemm", 50, 60, 1)
    nsys_database.kernel("gemm", 60, 70, 2)
    assert summarize(read_nsys_database(nsys_database.path)).launches_per_forward == 1


def test_correlations_of_other_processes_are_not_mixed_up(nsys_database):
    nsys_database.range(0, 1000, text="forward")
    nsys_database.call("cudaLaunchKernel_v7000", 10, 20, 1)
    nsys_database.kernel("gemm", 50, 60, 1)
    nsys_database.kernel("gemm", 100, 900, 1, pid=78 << 24)  # the other process's correlation 1
    (forward,) = summarize(read_nsys_database(nsys_database.path)).ranges
    assert forward.gpu_ms == pytest.approx(10 / 1e6)


def test_gpu_shares_are_means_over_the_devices(nsys_database):
    nsys_database.range(0, 1000, text="step")
    for device, end in ((0, 1000), (1, 500)):
        nsys_database.call("cudaLaunchKernel_v7000", 10, 20, device)
        nsys_database.kernel("gemm", 0, end, device, device=device)
    assert summarize(read_nsys_database(nsys_database.path)).gpu_busy_share == pytest.approx(0.75)


def test_fault_88_without_gpu_tables_the_fields_are_null(nsys_database):
    nsys_database.range(0, 5_000_000, text="step")
    nsys_database.range(0, 9_000_000, text="ignored: a mark", event_type=34)
    nsys_database.range(0, None, text="ignored: never closed")
    summary = summarize(read_nsys_database(nsys_database.path))
    assert summary.window_ms == 5.0
    for field in (
        "launches",
        "kernels",
        "gpu_busy_share",
        "gpu_idle_share",
        "dispatch_share",
        "wait_share",
        "communication_ms",
    ):
        assert getattr(summary, field) is None
    (step,) = summary.ranges
    assert (step.wall_ms, step.dispatch_ms, step.wait_ms, step.gpu_ms, step.launches) == (5.0, *[None] * 4)
    assert summary.as_dict()["gpu_busy_share"] is None
    missing = " ".join(summary.text().partition("not recorded: ")[2].split())
    assert "communication while compute runs" in missing
    assert "no CUDA tables" in summary.warnings[0]


def test_calls_without_kernels(nsys_database):
    nsys_database.range(0, 1000, text="step")
    nsys_database.call("cudaLaunchKernel_v7000", 10, 20, 1)
    summary = summarize(read_nsys_database(nsys_database.path))
    assert (summary.launches, summary.kernels, summary.gpu_busy_share) == (1, None, None)


def test_an_empty_recording(nsys_database):
    summary = summarize(read_nsys_database(nsys_database.path))
    assert (summary.steps, summary.window_ms, summary.ranges) == (0, 0.0, ())


def test_lost_kernels_are_warned_of(two_steps):
    for correlation in range(5000, 5010):
        two_steps.call("cudaLaunchKernel_v7000", 1_950_000, 1_950_001, correlation)
    (warning,) = summarize(read_nsys_database(two_steps.path)).warnings
    assert "18 kernel launches but 8 recorded kernels" in warning


def test_kernels_of_a_cuda_graph_are_not_missing_launches(two_steps):
    for node in range(100):
        two_steps.kernel("gemm", 1_800_000 + node, 1_800_001 + node, 6000, node=node + 1)
    assert summarize(read_nsys_database(two_steps.path)).warnings == ()


def test_steps_without_launches_are_unknown_not_empty(nsys_database):
    """As in files of an nsys that is older than the driver: the first launches are there, the rest is lost."""
    nsys_database.call("cudaLaunchKernel_v7000", 10, 20, 1)
    nsys_database.kernel("gemm", 50, 60, 1)
    nsys_database.range(1000, 2000, text="lmkit.step")
    summary = summarize(read_nsys_database(nsys_database.path))
    assert "lost events" in summary.warnings[0]
    assert "1 x step" in summary.warnings[0]
    assert (summary.launches, summary.kernels, summary.gpu_busy_share, summary.dispatch_share) == (None,) * 4
    (step,) = summary.ranges
    assert (step.wall_ms, step.launches, step.gpu_ms) == (0.001, None, None)


def test_a_step_that_only_launches_a_graph_has_lost_nothing(nsys_database):
    nsys_database.call("cudaLaunchKernel_v7000", 10, 20, 1)
    nsys_database.kernel("gemm", 50, 60, 1)
    nsys_database.range(1000, 2000, text="lmkit.step")
    nsys_database.call("cudaGraphLaunch_v10000", 1100, 1200, 2)
    nsys_database.kernel("gemm", 1300, 1400, 2, node=7)
    summary = summarize(read_nsys_database(nsys_database.path))
    assert (summary.launches, summary.kernels, summary.warnings) == (0, 1, ())
    assert summary.dispatch_share == pytest.approx(0.1)


def test_text_and_markdown(two_steps):
    summary = summarize(read_nsys_database(two_steps.path))
    assert max(map(len, summary.text().splitlines())) <= 100
    assert "44.0%" in summary.text()
    assert summary.markdown().startswith("# Profile of report.sqlite (nsys)")


@pytest.mark.parametrize("content", [b"", b"no database at all, however long this text may be" * 100])
def test_not_an_export(tmp_path, content):
    path = tmp_path / "x.sqlite"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read_nsys_database(path)
    assert caught.value.code in ("trace.damaged", "trace.wrong_kind")
    assert "x.sqlite" in caught.value.message


def test_missing_file_and_missing_column(tmp_path, nsys_database):
    with pytest.raises(UsageError) as caught:
        read_nsys_file(tmp_path / "absent.sqlite")
    assert caught.value.code == "trace.missing"
    nsys_database._insert("CUPTI_ACTIVITY_KIND_RUNTIME", "start INTEGER", (1,))
    with pytest.raises(LmkitError) as caught:
        read_nsys_database(nsys_database.path)
    assert (caught.value.code, "report.sqlite" in caught.value.message) == ("trace.damaged", True)
