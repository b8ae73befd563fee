import gzip
import json
from dataclasses import replace

import pytest
import torch
from raising import raises

from lmkit.core.ranges import range_
from lmkit.errors import UsageError
from lmkit.measure.trace import parse_chrome_trace, profile_work, read_chrome_trace
from lmkit.profile.summary import base_name, summarize


def event(category, name, start, duration, *, tid=1, pid=10, **args):
    place = {"ts": start, "dur": duration, "tid": tid, "pid": pid}
    return {"ph": "X", "cat": category, "name": name, "args": args, **place}


def on_gpu(category, name, start, duration, correlation):
    return event(category, name, start, duration, pid=0, tid=7, correlation=correlation, device=0)


def annotation(name, start, duration):
    return event("user_annotation", name, start, duration)


def trace_of(*events):
    return parse_chrome_trace({"traceEvents": events}, "t.json")


GPU_TRACE = {
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 10},
        annotation("ProfilerStep#1", 0, 1000),
        annotation("step", 0, 1000),
        annotation("forward", 100, 200),
        event("gpu_user_annotation", "forward", 100, 200, pid=0, tid=7),
        event("cpu_op", "aten::linear", 100, 100),
        event("cpu_op", "aten::mm", 120, 60),
        event("cuda_runtime", "cudaLaunchKernel", 130, 10, correlation=1),
        event("cuda_driver", "cuLaunchKernelEx", 210, 10, correlation=2),  # Triton
        event("cuda_runtime", "cudaLaunchKernel", 500, 10, correlation=3, tid=2),  # the autograd thread
        on_gpu("kernel", "gemm", 150, 100, 1),
        on_gpu("kernel", "softmax", 250, 50, 2),
        on_gpu("kernel", "gemm", 600, 300, 3),
        on_gpu("gpu_memset", "Memset (Device)", 950, 50, 9),
    ]
}


def test_a_gpu_trace_worked_by_hand():
    summary = summarize(parse_chrome_trace(GPU_TRACE, "t.json"))
    assert (summary["launches"], summary["kernels"]) == (3, 3)
    assert (summary["launches_per_forward"], summary["launches_per_step"]) == (2, 3)
    assert summary["gpu_busy_share"] == pytest.approx((150 + 300 + 50) / 1000)
    assert summary["dispatch_share"] == pytest.approx(0.03)
    assert [entry["name"] for entry in summary["ranges"]] == ["step", "forward"]
    assert summary["ranges"][1]["gpu_ms"] == pytest.approx(0.150)
    ops = {entry["name"]: entry["total_ms"] for entry in summary["top_ops"]}
    assert ops == {"aten::linear": pytest.approx(0.040), "aten::mm": pytest.approx(0.060)}
    assert summary["warnings"] == []


def test_the_range_that_torch_puts_around_an_optimizer_step_is_no_step():
    """torch names it "Optimizer.step#AdamW.step", inside our own step."""
    names = ("step", "Optimizer.step#AdamW.step")
    summary = summarize(trace_of(annotation(names[0], 0, 1000), annotation(names[1], 800, 100)), skip_steps=0)
    assert (summary["steps"], summary["window"], summary["window_ms"]) == (1, "1 x step", 1.0)
    assert [entry["name"] for entry in summary["ranges"]] == ["step"]
    assert [base_name(name) for name in ("lmkit.step", *names)] == ["step", *names]


def test_waiting_for_the_gpu_is_not_dispatch():
    """In the 1000 us of a step the CPU launches for 100, waits in a synchronization for 300, and in a copy to the
    host, which returns when the copy is done, for 200. A copy that only was asked for (20) is dispatch."""
    trace = trace_of(
        annotation("step", 0, 1000),
        event("cuda_runtime", "cudaLaunchKernel", 100, 100, correlation=1),
        event("cuda_runtime", "cudaMemcpyAsync", 210, 20, correlation=4),
        event("cuda_runtime", "cudaStreamSynchronize", 300, 300, correlation=2),
        event("cuda_runtime", "cudaMemcpyAsync", 700, 200, correlation=3),
        on_gpu("kernel", "gemm", 150, 430, 1),
        on_gpu("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 580, 10, 4),
        on_gpu("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 880, 10, 3),
    )
    summary = summarize(trace)
    assert (summary["dispatch_share"], summary["wait_share"]) == (pytest.approx(0.120), pytest.approx(0.500))
    (step,) = summary["ranges"]
    assert (step["dispatch_ms"], step["wait_ms"]) == (pytest.approx(0.120), pytest.approx(0.500))
    assert step["dispatch_share"] == pytest.approx(0.120)


def test_a_profiler_that_slows_the_work_down_says_so():
    trace = parse_chrome_trace(GPU_TRACE, "t.json")  # one step of 1 ms
    assert summarize(trace)["undisturbed_gpu_share"] is None
    assert summarize(replace(trace, undisturbed_ms=0.95))["warnings"] == []
    slowed = summarize(replace(trace, undisturbed_ms=0.5))
    (warning,) = slowed["warnings"]
    assert "2.00 times as long" in warning
    # 150 + 300 us of kernels that the step's calls caused
    assert slowed["undisturbed_gpu_share"] == pytest.approx(0.9)


def test_without_steps_the_passes_make_the_window():
    names = ("forward", "attention")
    trace = trace_of(*(annotation(name, start, 100) for start in (0, 200, 400) for name in names))
    summary = summarize(trace)  # 200 to 500: the first is the warm-up
    assert (summary["window"], summary["window_ms"]) == ("2 x forward", 0.3)


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_files_are_read(tmp_path, suffix):
    path = tmp_path / f"trace{suffix}"
    content = json.dumps(GPU_TRACE).encode()
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    assert summarize(read_chrome_trace(path))["launches"] == 3


BAD = [b"", b"{}", b"[1]", b"7", b"\xff", b'{"traceEvents": [{"ph": "X"}]}', b'{"traceEvents": [1]}']


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
@pytest.mark.parametrize("content", BAD)
def test_other_files_are_refused(tmp_path, name, content):
    path = tmp_path / name
    for wrong in (content, gzip.compress(content), gzip.compress(content)[:-9]):
        path.write_bytes(wrong)
        with raises(UsageError, "trace.damaged", "trace.json", hint="lmkit profile kineto RECIPE"):
            read_chrome_trace(path)


def test_recording_on_a_cpu(ranges_are_on):
    weight = torch.randn(64, 64)
    calls = []

    def work() -> None:
        calls.append(ranges_are_on())
        with range_("step"):
            for _ in range(20):
                with range_("forward"):
                    weight @ weight

    trace, content = profile_work(work, steps=3, warmup=2, device=torch.device("cpu"), source="a test")
    assert calls == [False] * 2 + [False] * 3 + [True] * 3  # warm-up, stop watch, profiler
    assert not ranges_are_on()
    summary = summarize(trace)
    ranges = {entry["name"]: entry for entry in summary["ranges"]}
    assert (summary["steps"], ranges["forward"]["instances"]) == (2, 40)
    assert 0 < ranges["forward"]["wall_ms"] < ranges["step"]["wall_ms"]
    assert summary["undisturbed_ms"] > 0
    assert summary["gpu_busy_share"] is None
    assert "aten::mm" in {entry["name"] for entry in summary["top_ops"]}
    assert "GPU" in summary["warnings"][0]
    assert json.loads(content)["traceEvents"]
