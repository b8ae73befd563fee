"""Prepared launches are Triton's own: the same variant of the kernel, the same grid, the same arguments.

On a GPU that is not there (see `stand_in_gpu`): what reaches the C launcher is compared with what an ordinary launch,
`kernel[grid](...)`, of the same call hands to it.
"""

import gc
import weakref
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from marking import full_but, full_except

pytest.importorskip("triton", reason="Triton is not installed")

from lmkit.kernels import cross_entropy, launch
from lmkit.kernels.flash import backward as flash_backward
from lmkit.kernels.flash import forward as flash_forward
from lmkit.kernels.flash import tuning
from lmkit.kernels.flash.tuning import Tiling
from lmkit.kernels.launch import LaunchCache, empty_in_order_of, recording

POINTERS = Tiling(rows=32, columns=16, warps=4, stages=1)
COPIED = Tiling(rows=64, columns=32, warps=4, stages=2, descriptors=True)
CALLS = (flash_forward.forward_calls, flash_backward.backward_calls, cross_entropy.scale_calls)


def inputs(
    *, queries=64, keys=64, heads=4, kv_heads=2, head_dim=32, dtype=torch.bfloat16, layout="dense", skip=(0, 0, 0, 0),
    cut=0,
):  # fmt: skip
    """(q, k, v, dout). layout: "dense", "fused" (slices of one projection) or "odd" (row strides of no use to 16-byte
    loads). skip: elements before each tensor, which make its address odd. cut: rows left out at the end."""

    def make(heads, length, skip):
        if layout == "dense":
            memory = torch.zeros(heads * length * head_dim + skip, dtype=dtype)[skip:]
            return memory.view(1, heads, length, head_dim)
        width = 3 * heads * head_dim + (layout == "odd")
        memory = torch.zeros(length * width + skip, dtype=dtype)[skip:].view(1, length, width)
        return memory[..., : heads * head_dim].view(1, length, heads, head_dim).transpose(1, 2)

    sizes = (heads, queries), (kv_heads, keys), (kv_heads, keys), (heads, queries)
    tensors = [make(*size, before) for size, before in zip(sizes, skip, strict=True)]
    return tuple(x[:, :, : x.shape[2] - cut] for x in tensors)


def forward(q, k, v, dout, causal=True, tiling=POINTERS):
    """The forward pass on tensors that stay the same however often it is called."""
    lse = torch.empty(q.shape[:3])
    outputs, options = (empty_in_order_of(q), lse, lse), (causal, 0.125, "ieee", tiling, False)
    return lambda: flash_forward.forward_calls((q, k, v), outputs, options)


def backward(q, k, v, dout, causal=True, tiling=POINTERS):
    """The same for the backward pass."""
    out, lse = empty_in_order_of(q), torch.empty(q.shape[:3])
    outputs = (torch.empty_like(lse), *(empty_in_order_of(x) for x in (q, k, v)), lse, lse)
    options = (causal, 0.125, "ieee", tiling, tiling, False, None)
    return lambda: flash_backward.backward_calls((q, k, v, out, dout, lse), outputs, options)


def launches_of(call, gpu):
    """What reaches the C launcher."""
    del gpu.launches[:]
    call()
    assert gpu.launches
    return list(gpu.launches)


def ordinary(call, gpu, monkeypatch):
    """The same when Triton launches, and nothing is known."""
    with monkeypatch.context() as patch:
        patch.setattr(launch, "PREPARES", False)
        for calls in CALLS:
            patch.setattr(calls, "prepared", {})
        return launches_of(call, gpu)


@pytest.mark.parametrize("run", [forward, backward])
@pytest.mark.parametrize(
    "tiling",
    full_except(POINTERS, COPIED, Tiling(32, 16, 4, 1, apart=True)),
    ids=["pointers", "copied", "apart"],
)
@pytest.mark.parametrize("causal", full_but([True], [False, True]))
def test_prepared_launches_are_tritons_own(run, tiling, causal, stand_in_gpu, monkeypatch):
    call = run(*inputs(), causal=causal, tiling=tiling)
    expected = ordinary(call, stand_in_gpu, monkeypatch)
    assert len(expected) == (1 if run is forward else 3 if tiling.apart else 2)
    assert launches_of(call, stand_in_gpu) == expected  # prepared
    assert launches_of(call, stand_in_gpu) == expected  # known


# What changes between the calls of one process; every one of them alone, against the first.
CHANGES = [
    {},
    {"queries": 96, "keys": 96},
    {"cut": 16},  # the first rows of longer ones
    *({"queries": n, "keys": n} for n in (63, 1)),
    *({"keys": 100}, {"kv_heads": 4}, {"heads": 1, "kv_heads": 1}, {"head_dim": 40}),
    *({"dtype": dtype} for dtype in (torch.float16, torch.float32)),
    *({"layout": layout} for layout in ("fused", "odd")),
    *({"skip": (n,) * 4} for n in (1, 4)),  # odd addresses, and of 8 bytes
    *({"skip": [int(j == i) for j in range(4)]} for i in range(4)),
    {"skip": (1, 1, 1, 1), "layout": "odd"},
]
OPTIONS = [{"causal": False}, {"tiling": COPIED}]


@pytest.mark.full
@pytest.mark.parametrize("run", [forward, backward])
def test_whatever_changes_between_calls_the_launch_is_tritons_own(run, stand_in_gpu, monkeypatch):
    calls = [run(*inputs(**change)) for change in CHANGES]
    calls += [run(*inputs(), **options) for options in OPTIONS]
    expected = [ordinary(call, stand_in_gpu, monkeypatch) for call in calls]
    variants = {str([function for _, _, function, *_ in launches]) for launches in expected}
    assert len(variants) > len(CHANGES) // 2  # or the changes would not be seen
    for _ in range(2):  # prepared, then known
        assert [launches_of(call, stand_in_gpu) for call in calls] == expected


def test_a_result_of_another_dtype_is_of_another_kind(stand_in_gpu):
    """The weight's gradient is a float32 sum for float16 and for bfloat16."""
    sums, scale = torch.ones(4, 64), torch.ones(())
    calls = [partial(cross_entropy.scaled_, sums, scale, dtype) for dtype in (torch.float16, torch.bfloat16)]
    functions = [launches_of(call, stand_in_gpu)[0][2] for call in calls]
    assert functions[0] != functions[1]


def test_other_tensors_of_the_same_kind_are_launched_on_without_preparing(stand_in_gpu, monkeypatch):
    first, second = forward(*inputs()), forward(*inputs())
    expected = ordinary(second, stand_in_gpu, monkeypatch)
    assert launches_of(first, stand_in_gpu) != expected  # other pointers
    monkeypatch.setattr(flash_forward.forward_calls, "prepare", None)
    assert launches_of(second, stand_in_gpu) == expected


def test_kinds_are_forgotten_when_there_are_too_many(stand_in_gpu, monkeypatch):
    monkeypatch.setattr(LaunchCache, "MOST_KINDS", 2)
    calls = [forward(*inputs(queries=queries)) for queries in (16, 32, 48, 16)]
    for call in calls:
        assert launches_of(call, stand_in_gpu) == ordinary(call, stand_in_gpu, monkeypatch)
        assert len(flash_forward.forward_calls.prepared) <= 2


@pytest.mark.parametrize("run", [forward, backward])
def test_no_tensor_is_kept_alive(run, stand_in_gpu):
    tensors = inputs()
    kept = [weakref.ref(x) for x in tensors]
    call = run(*tensors)
    call()
    del tensors, call
    assert not any(ref() is not None for ref in kept)


def test_nothing_is_kept_from_a_capture(stand_in_gpu, monkeypatch):
    call = forward(*inputs())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert launches_of(call, stand_in_gpu) == ordinary(call, stand_in_gpu, monkeypatch)
    assert not flash_forward.forward_calls.prepared


@pytest.fixture
def record(monkeypatch):
    """Records a block that fails, in a graph whose recording PyTorch can end, or not: then it stays on the stream of
    the graph. Returns the stream afterwards, what the allocator was told, and whether garbage was collected."""
    streams, told, collects = ["before"], [], []

    @contextmanager
    def stream(other):
        try:
            yield
        finally:
            streams.append(other)

    @contextmanager
    def capture(graph, **options):
        streams.append("of the graph")
        yield

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *which: told.append(("release", *which)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[-1])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "graph", capture)

    def run(*, ended):
        def pool():
            if not ended:
                raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")

        def step():
            with recording(SimpleNamespace(pool=pool)):
                collects.append(gc.isenabled())
                raise RuntimeError("by the step")

        with pytest.raises(RuntimeError, match="by the step"):
            step()
        return streams[-1], told, collects

    return run


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.13.0", "2.14.0"])
@pytest.mark.parametrize("ended", [True, False])
def test_stream_and_allocator_leave_a_recording_that_cannot_be_ended(ended, version, monkeypatch, record):
    """PyTorch 2.11 stays in it: memory of several streams was never free, and freeing a `MemPool` aborted."""
    ends = []

    def end(*which):
        if not version.startswith("2.11"):
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        ends.append(which)

    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end)
    stream, told, _ = record(ended=ended)
    assert stream == "before"
    assert ends == ([(0, "pool")] if version.startswith("2.11") and not ended else [])
    assert told == ([] if ended or version == "2.14.0" else [("release", 0, "pool")])


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_during_a_recording(record, collects):
    """The collector is afterwards as before."""
    (gc.enable if collects else gc.disable)()
    try:
        *_, collected = record(ended=True)
        assert gc.isenabled() == collects
    finally:
        gc.enable()
    assert collected == [False]


def test_candidates_are_measured_on_the_callers_tensors(stand_in_gpu, monkeypatch):
    """Each is prepared once, however often it is timed; then the winner runs."""
    tensors = inputs()
    asked = []

    def choose(case, device, launch):
        asked.append((case, device))
        for tiling in (POINTERS, COPIED, COPIED):
            launch(tiling)
        return COPIED

    monkeypatch.setattr(tuning, "choose_tiling", choose)
    call = forward(*tensors, tiling=None)
    launched = launches_of(call, stand_in_gpu)
    case = tuning.Case("forward", 32, True, torch.bfloat16, "ieee", 512, aligned=True)
    assert asked == [(case, tensors[0].device)]
    assert len(launched) == 4
    assert launched[1] == launched[2] == launched[3] != launched[0]
    assert launches_of(call, stand_in_gpu) == launched[3:]  # nobody is asked again
    assert len(asked) == 1
