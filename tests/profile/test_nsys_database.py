import pytest
from raising import raises

from lmkit.errors import LmkitError, UsageError
from lmkit.profile.nsys import read_nsys_database, read_nsys_file
from lmkit.profile.summary import summarize, summarize_trace, text_of


def summary_of(database, **options):
    return summarize(read_nsys_database(database.path), **options)


def values(summary, *keys):
    return tuple(summary[key] for key in keys)


def test_the_answers_of_a_recording_worked_by_hand(two_steps):
    summary = summary_of(two_steps)
    assert values(summary, "engine", "source", "warnings") == ("nsys", "report.sqlite", [])
    assert values(summary, "steps", "window_ms") == (1, 1.0)  # the first is skipped
    launches = values(summary, "launches", "kernels", "launches_per_forward", "launches_per_step")
    assert launches == (4, 4, 2, 4)
    # 200-350 and 500-790 (gemm 500-700, copy 700-710, nccl 610-790) of 1000
    assert summary["gpu_busy_share"] == pytest.approx((150 + 290) / 1000)
    assert summary["gpu_idle_share"] == pytest.approx(1 - 0.44)
    # 10 + 10 + 20 + 5 + 10 of 1000; nothing waits, the copy is asynchronous
    assert summary["dispatch_share"] == pytest.approx(0.055)
    assert summary["wait_share"] == 0.0
    assert summary["communication_ms"] == pytest.approx(0.180)
    # gemm, then the copy
    assert summary["communication_overlap_share"] == pytest.approx((700 - 610 + 10) / 180)
    ranges = {entry["name"]: entry for entry in summary["ranges"]}
    forward = ranges["lmkit.forward"]
    keys = ("instances", "launches", "wall_ms", "dispatch_ms", "dispatch_share", "wait_ms", "gpu_ms")
    assert values(forward, *keys) == pytest.approx((1, 2, 0.2, 0.020, 0.1, 0.0, 0.150))
    assert forward.keys() == {"name", *keys}
    # launched by another thread, and still backward's own
    launches = values(ranges["lmkit.backward"], "launches", "dispatch_ms", "gpu_ms")
    assert launches == (2, pytest.approx(0.035), pytest.approx(0.290))
    kernels = [(top["name"], top["calls"]) for top in summary["top_kernels"]]
    assert kernels == [("gemm", 3), ("ncclAllReduce", 1), ("memcpy", 1)]
    assert summary["top_kernels"][0]["share"] == pytest.approx(400 / 590)
    assert "44.0%" in text_of(summary)
    assert summarize_trace([summary]).title == "Profile of report.sqlite (nsys)"


def test_all_steps_count_if_asked(two_steps):
    summary = summary_of(two_steps, skip_steps=0)
    assert values(summary, "steps", "launches", "window_ms") == (2, 8, 2.0)
    dispatch = {entry["name"]: entry["dispatch_ms"] for entry in summary["ranges"]}
    assert dispatch["lmkit.forward"] == pytest.approx(0.030)


def test_the_first_step_of_every_process_is_its_warm_up(nsys_database):
    for process in (77, 78):
        for begin in (0, 1000, 2000):
            nsys_database.range(begin + process, begin + 900, "step", tid=process << 24 | 1)
    assert values(summary_of(nsys_database), "steps", "window_ms") == (4, (2900 - 1077) / 1e6)


def test_a_range_owns_the_launches_of_its_own_thread_and_process(nsys_database):
    nsys_database.range(0, 1000, "forward")
    nsys_database.launch(10, 1, work=(50, 60))
    nsys_database.launch(30, 2, work=(60, 70), tid=77 << 24 | 9)
    nsys_database.launch(50, 3, work=(1500, 1600))  # starts after the window and belongs to it
    nsys_database.kernel("gemm", 100, 900, 1, process=78)  # the other process's correlation 1
    summary = summary_of(nsys_database)
    assert values(summary, "launches_per_forward", "kernels") == (2, 4)
    assert summary["ranges"][0]["gpu_ms"] == pytest.approx(110 / 1e6)


def test_gpu_shares_are_means_over_the_devices(nsys_database):
    nsys_database.range(0, 1000, "step")
    for device, end in ((0, 1000), (1, 500)):
        nsys_database.launch(10, device)
        nsys_database.kernel("gemm", 0, end, device, device=device)
    assert summary_of(nsys_database)["gpu_busy_share"] == pytest.approx(0.75)


def test_without_gpu_tables_the_fields_are_null(nsys_database):
    nsys_database.range(0, 5_000_000, "step")
    nsys_database.range(0, 4_000_000, "ignored: a mark", event_type=34)
    nsys_database.range(0, None, "ignored: never closed")
    summary = summary_of(nsys_database)
    assert summary["window_ms"] == 5.0
    missing = ("launches", "kernels", "gpu_busy_share", "gpu_idle_share", "dispatch_share", "wait_share",
               "communication_ms")  # fmt: skip
    assert values(summary, *missing) == (None,) * 7
    (step,) = summary["ranges"]
    assert values(step, "wall_ms", "dispatch_ms", "wait_ms", "gpu_ms", "launches") == (5.0, *[None] * 4)
    assert "GPU busy" in text_of(summary).partition("not recorded: ")[2]
    assert len(summary["warnings"]) == 1


def test_a_recording_without_ranges_and_with_lost_kernels_warns(nsys_database):
    for correlation in range(10):
        nsys_database.launch(10 * correlation, correlation, work=(50, 60) if correlation < 8 else ())
    ranges, lost = summary_of(nsys_database)["warnings"]
    assert "no NVTX ranges" in ranges
    assert "10 kernel launches but 8 recorded kernels" in lost


def test_kernels_of_a_cuda_graph_are_not_missing_launches(two_steps):
    for node in range(100):
        two_steps.kernel("gemm", 1_800_000 + node, 1_800_001 + node, 6000, node=node + 1)
    assert summary_of(two_steps)["warnings"] == []


def test_steps_without_launches_are_unknown_not_empty(nsys_database):
    """As in files of an nsys that is older than the driver: the first launches are there, the rest is lost."""
    nsys_database.launch(10, 1, work=(50, 60))
    nsys_database.range(1000, 2000, "lmkit.step")
    summary = summary_of(nsys_database)
    assert "1 x step" in summary["warnings"][0]
    assert values(summary, "launches", "kernels", "gpu_busy_share", "dispatch_share") == (None,) * 4
    assert values(summary["ranges"][0], "wall_ms", "launches", "gpu_ms") == (0.001, None, None)


def test_a_step_that_only_launches_a_graph_has_lost_nothing(nsys_database):
    nsys_database.launch(10, 1, work=(50, 60))
    nsys_database.range(1000, 2000, "lmkit.step")
    nsys_database.call("cudaGraphLaunch_v10000", 1100, 1200, 2)
    nsys_database.kernel("gemm", 1300, 1400, 2, node=7)
    summary = summary_of(nsys_database)
    assert values(summary, "launches", "kernels", "warnings") == (0, 1, [])
    assert summary["dispatch_share"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("x.sqlite", b"", "trace.wrong_kind"),
        ("x.sqlite", b"no database at all, however long this text may be" * 100, "trace.damaged"),
        ("a.txt", None, "trace.wrong_kind"),
        *((f"absent.{suffix}", None, "trace.missing") for suffix in ("sqlite", "nsys-rep")),
    ],
)
def test_other_files_are_refused(tmp_path, name, content, code):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with raises(UsageError, code, name):
        read_nsys_file(tmp_path / name)


def test_a_table_without_a_column_is_damaged(nsys_database):
    nsys_database.insert("CUPTI_ACTIVITY_KIND_RUNTIME", (1,), "start")
    with raises(LmkitError, "trace.damaged", "report.sqlite"):
        read_nsys_database(nsys_database.path)
