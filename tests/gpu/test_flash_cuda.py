"""flash_cuda on a GPU against the float64 oracle, no further from it than 1.2 times PyTorch's FlashAttention-2."""

import shutil
from functools import partial

import pytest
import torch
from attention_oracle import faults_of
from raising import raises

from lmkit.attention import attention_function
from lmkit.attention.run import run_attention
from lmkit.errors import UsageError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        shutil.which("nvcc") is None, reason="nvcc compiles the kernels, and is not installed"
    ),
]

LENGTHS = [(1, 1), (127, 127), (129, 129), (1024, 1024), (1000, 300), (300, 1000)]

both_masks = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@pytest.fixture
def kernel():
    return attention_function("flash_cuda")


def faults(kernel, inputs, causal):
    """What is further from the oracle than 1.2 times PyTorch's FlashAttention-2; or `reference`, if that cannot run.

    It reads 16 bytes at once of any address, and aligns the mask of a rectangle with its last row.
    """
    q, k = inputs[:2]
    rival = attention_function("sdpa")
    if q.data_ptr() % 16 or (causal and q.shape[2] != k.shape[2]):
        rival = attention_function("reference")
    else:
        rival = partial(rival, backend="flash")
    return faults_of(kernel, rival, *inputs, causal=causal, allowance=1.2)


@both_masks
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
def test_bfloat16_equals_the_oracle(kernel, queries, keys, head_dim, causal, random_inputs):
    assert faults(kernel, random_inputs(queries=queries, keys=keys, head_dim=head_dim), causal) == []


@both_masks
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [*((size, torch.bfloat16) for size in (8, 32, 40, 80, 96)), (64, torch.float16), (128, torch.float16)],
    ids=str,
)
def test_every_head_dim_and_dtype(kernel, head_dim, dtype, causal, random_inputs):
    assert faults(kernel, random_inputs(queries=300, keys=300, head_dim=head_dim, dtype=dtype), causal) == []
    assert faults(kernel, random_inputs(queries=129, keys=200, head_dim=head_dim, dtype=dtype), causal) == []


@both_masks
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
def test_the_form_for_sm_75(kernel, head_dim, causal, random_inputs):
    inputs = random_inputs(queries=300, keys=200, head_dim=head_dim, dtype=torch.float16)
    assert faults(partial(kernel, build="PTX=75"), inputs, causal) == []


@both_masks
def test_the_naive_kernel(kernel, causal, random_inputs):
    inputs = random_inputs(heads=4, kv_heads=2, queries=129, keys=200, head_dim=80)
    assert faults(partial(kernel, naive=True), inputs, causal) == []


@pytest.mark.parametrize(("kv_heads", "causal"), [(1, True), (2, False), (2, True)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_grouped_heads(kernel, kv_heads, causal, head_dim, random_inputs):
    inputs = random_inputs(batch=2, heads=8, kv_heads=kv_heads, queries=300, head_dim=head_dim)
    assert faults(kernel, inputs, causal) == []


def test_views_of_one_projection(kernel):
    projection = torch.randn(2, 300, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    q, k, v = (projection[:, :, i].transpose(1, 2) for i in range(3))
    dout = torch.randn(2, 300, 4, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    assert faults(kernel, (q, k, v, dout), True) == []


def test_unaligned_views(kernel):
    storage = torch.randn(2 * 2 * 200 * 67 + 1, device="cuda", dtype=torch.bfloat16)
    x = storage[1:].view(2, 2, 200, 67)[
        ..., :64
    ]  # odd address, odd strides: no 16 bytes can be copied at once
    assert faults(kernel, (x, x.flip(2), x.flip(0), x.flip(1)), True) == []


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("data", ["logits x 8", "sink", "late sink", "ramp up", "ramp down", "very low"])
def test_data_like_a_trained_models(kernel, data, head_dim, random_inputs):
    q, k, v, dout = random_inputs(queries=1000, head_dim=head_dim)
    ramp = torch.linspace(0, 40, 1000, device="cuda", dtype=k.dtype)[:, None] / head_dim**0.5
    if data == "logits x 8":
        q = q * 8
    elif data.endswith("sink"):  # one key 60 nats above the rest
        k[:, :, 3 if data == "sink" else 500] = 60.0 / head_dim**0.5
        q = q.abs()
    elif data == "very low":  # 2^-score of a row that masked keys have no part in would be infinite
        q, k = q.abs() * 8, -k.abs() * 8
    else:  # the running maximum changes in every tile, or never
        k = k + (ramp if data == "ramp up" else ramp.flip(0))
        q = q.abs()
    assert faults(kernel, (q, k, v, dout), True) == []


@pytest.mark.parametrize("scale", [0.7, -0.5, 0.0])
def test_a_scale_of_any_sign(kernel, scale, random_inputs):
    inputs = random_inputs(queries=200)
    assert faults_of(kernel, attention_function("reference"), *inputs, causal=True, scale=scale) == []


@both_masks
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_same_bits_on_every_run(kernel, head_dim, causal, random_inputs):
    inputs = random_inputs(batch=4, heads=8, kv_heads=2, queries=3000, head_dim=head_dim)
    first = run_attention(kernel, *inputs, causal=causal)
    for _ in range(20):
        again = run_attention(kernel, *inputs, causal=causal)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_compile_sees_no_graph_break(kernel, random_inputs):
    inputs = random_inputs(queries=300)
    compiled = torch.compile(kernel, fullgraph=True)
    eager, traced = (run_attention(function, *inputs, causal=True) for function in (kernel, compiled))
    assert all(torch.equal(a, b) for a, b in zip(eager, traced, strict=True))


def test_runs_inside_a_cuda_graph(kernel, random_inputs):
    *inputs, dout = random_inputs(queries=300)
    expected = run_attention(kernel, *inputs, dout, causal=True)
    leaves = [x.detach().requires_grad_() for x in inputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel(*leaves, causal=True)
        results = (out, *torch.autograd.grad(out, leaves, dout))
    for _ in range(2):
        for x in results:
            x.detach().zero_()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_memory_is_linear_in_the_length(kernel, random_inputs):
    q, k, v, dout = random_inputs(batch=1, heads=1, queries=65_536)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run_attention(kernel, q, k, v, dout, causal=True)
    one_tensor = q.numel() * q.element_size()
    # out, three gradients, the float32 sum of dq (two), statistics, and a few temporaries; the scores would be 8 GiB.
    assert torch.cuda.max_memory_allocated() - before < 12 * one_tensor


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(136, torch.bfloat16), (20, torch.float16), (64, torch.float32)]
)
def test_refusals_name_what_is_supported(kernel, head_dim, dtype, random_inputs):
    with raises(UsageError, "attention.unsupported"):
        kernel(*random_inputs(head_dim=head_dim, dtype=dtype)[:3], causal=True)
