import gzip
import json
import time

import pytest
import torch

from lmkit.errors import UsageError
from lmkit.measure.ranges import range_, ranges_are_on
from lmkit.profiling.kineto import parse_chrome_trace, profile_work, read_chrome_trace
from lmkit.profiling.summary import summarize


def event(category, name, start, duration, *, tid=1, pid=10, **args):
    place = {"ts": start, "dur": duration, "tid": tid, "pid": pid}
    return {"ph": "X", "cat": category, "name": name, "args": args, **place}


GPU_TRACE = {
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 10},
        event("user_annotation", "ProfilerStep#1", 0, 1000),
        event("user_annotation", "step", 0, 1000),
        event("user_annotation", "forward", 100, 200),
        event("gpu_user_annotation", "forward", 100, 200, pid=0, tid=7),
        event("cpu_op", "aten::linear", 100, 100),
        event("cpu_op", "aten::mm", 120, 60),
        event("cuda_runtime", "cudaLaunchKernel", 130, 10, correlation=1),
        event("cuda_driver", "cuLaunchKernelEx", 210, 10, correlation=2),  # Triton
        event("cuda_runtime", "cudaLaunchKernel", 500, 10, correlation=3, tid=2),  # the autograd thread
        event("kernel", "gemm", 150, 100, pid=0, tid=7, correlation=1, device=0),
        event("kernel", "softmax", 250, 50, pid=0, tid=7, correlation=2, device=0),
        event("kernel", "gemm", 600, 300, pid=0, tid=7, correlation=3, device=0),
        event("gpu_memset", "Memset (Device)", 950, 50, pid=0, tid=7, correlation=9, device=0),
    ]
}


def test_a_gpu_trace_worked_by_hand():
    summary = summarize(parse_chrome_trace(GPU_TRACE, "t.json"))
    assert (summary.launches, summary.kernels) == (3, 3)
    assert (summary.launches_per_forward, summary.launches_per_step) == (2, 3)
    assert summary.gpu_busy_share == pytest.approx((150 + 300 + 50) / 1000)
    assert summary.dispatch_share == pytest.approx(0.03)
    assert [entry.name for entry in summary.ranges] == ["step", "forward"]
    assert summary.ranges[1].gpu_ms == pytest.approx(0.150)
    ops = {entry.name: entry.total_ms for entry in summary.top_ops}
    assert ops == {"aten::linear": pytest.approx(0.040), "aten::mm": pytest.approx(0.060)}
    assert summary.warnings == ()


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_files_are_read(tmp_path, suffix):
    path = tmp_path / f"trace{suffix}"
    content = json.dumps(GPU_TRACE).encode()
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    assert summarize(read_chrome_trace(path)).launches == 3


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff", b'{"traceEvents": [{"ph": "X"}]}'])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"trace\.json"):
        read_chrome_trace(path)


def test_recording_on_a_cpu():
    weight = torch.randn(64, 64)
    calls = []

    def work() -> None:
        calls.append(ranges_are_on())
        with range_("step"):
            with range_("forward"):
                weight @ weight
            time.sleep(0.002)

    run = profile_work(work, steps=3, warmup=2, device="cpu", source="a test")
    assert calls == [False, False, True, True, True]
    assert not ranges_are_on()
    summary = summarize(run.trace)
    assert summary.steps == 2
    by_name = {entry.name: entry for entry in summary.ranges}
    assert by_name["step"].wall_ms >= 2.0
    assert by_name["forward"].wall_ms < by_name["step"].wall_ms
    assert summary.gpu_busy_share is None
    assert "aten::mm" in {entry.name for entry in summary.top_ops}
    assert "GPU" in summary.warnings[0]
    assert json.loads(run.chrome_trace)["traceEvents"]


def test_ranges_are_off_again_after_a_failure():
    def work() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        profile_work(work, steps=1, warmup=0, device="cpu", source="a test")
    assert not ranges_are_on()
