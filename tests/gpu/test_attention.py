"""Attention on a GPU against the float64 oracle: values and gradients of flash_triton's two implementations and of
flash_cuda, which may be no further from it than 1.2 times PyTorch's FlashAttention-2."""

import itertools
import shutil
from functools import partial

import pytest
import torch
from attention_oracle import exact_attention, faults_of, first_keys
from raising import raises

from lmkit.attention import attention_function
from lmkit.attention.run import run_attention
from lmkit.core.attention import reference
from lmkit.errors import UsageError
from lmkit.kernels.flash import tuning

pytestmark = pytest.mark.gpu

# No length of the first four is a multiple of 16 or 1, for which kernels are compiled anew: compiling takes time.
LENGTHS = [(127, 127), (129, 129), (1000, 300), (300, 1000), (1, 1), (1024, 1024)]
TRITON = ["portable", "auto"]  # with the portable kernels, and with whatever it picks on this chip
needs_nvcc = pytest.mark.skipif(
    shutil.which("nvcc") is None, reason="nvcc compiles the kernels, and is not installed"
)
CUDA = pytest.param("cuda", marks=needs_nvcc)
both_masks = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@pytest.fixture(autouse=True)
def _default_tilings(monkeypatch):
    """The first candidate of every case instead of the fastest: no tuning, and the same kernels in every run."""
    monkeypatch.setattr(tuning, "measure", lambda case, candidates, *rest: candidates[0])


def kernel_of(name):
    if name == "cuda":
        return attention_function("flash_cuda")
    return partial(attention_function("flash_triton"), implementation=name)


@pytest.fixture(params=TRITON)
def kernel(request):
    return kernel_of(request.param)


@pytest.fixture
def portable():
    return kernel_of("portable")


def faults(name, inputs, causal, **options):
    """What is further from the oracle than is allowed beside `reference`, of flash_cuda beside FlashAttention-2.

    That reads 16 bytes at once of any address, and aligns the mask of a rectangle with its last row.
    """
    kernel, (q, k, *_) = partial(kernel_of(name), **options), inputs
    if name != "cuda":
        return faults_of(kernel, reference, *inputs, causal=causal)
    runs = q.data_ptr() % 16 == 0 and not (causal and q.shape[2] != k.shape[2])
    rival = partial(attention_function("sdpa"), backend="flash") if runs else reference
    return faults_of(kernel, rival, *inputs, causal=causal, allowance=1.2)


@both_masks
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
@pytest.mark.parametrize("name", [*TRITON, CUDA])
def test_bfloat16_equals_the_oracle(name, queries, keys, head_dim, causal, random_inputs):
    assert faults(name, random_inputs(queries=queries, keys=keys, head_dim=head_dim), causal) == []


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HEADS_OF_CUDA = [*((size, BF16) for size in (8, 32, 40, 80, 96)), (64, FP16), (128, FP16)]
OF_CUDA = [(*head, lengths, {}) for head in HEADS_OF_CUDA for lengths in ((300, 300), (129, 200))]
OF_CUDA += [(size, FP16, (300, 200), {"build": "PTX=75"}) for size in (32, 64, 96, 128)]
OF_CUDA += [(80, BF16, (129, 200), {"naive": True})]
HEADS = [*(("auto", size, BF16) for size in (16, 32, 40, 80, 96, 256)), ("portable", 256, BF16)]
HEADS += [("auto", 80, FP16), ("auto", 64, FP32), ("auto", 80, FP32)]
CASES = [(*head, (129, 200), {}) for head in HEADS]
CASES += [pytest.param("cuda", *case, marks=needs_nvcc) for case in OF_CUDA]


@both_masks
@pytest.mark.parametrize(("name", "head_dim", "dtype", "lengths", "options"), CASES, ids=str)
def test_every_head_dim_dtype_and_form(name, head_dim, dtype, lengths, options, causal, random_inputs):
    sizes = dict(zip(("queries", "keys"), lengths, strict=True), head_dim=head_dim)
    inputs = random_inputs(**sizes, kv_heads=1 if "naive" in options else 2, dtype=dtype)
    assert faults(name, inputs, causal, **options) == []


@pytest.mark.parametrize(("kv_heads", "causal"), [(1, True), (2, False), (2, True)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", [*TRITON, CUDA])
def test_grouped_heads(name, head_dim, kv_heads, causal, random_inputs):
    inputs = random_inputs(batch=2, heads=8, kv_heads=kv_heads, queries=300, head_dim=head_dim)
    assert faults(name, inputs, causal) == []


@pytest.mark.parametrize("name", [*TRITON, CUDA])
def test_views_of_one_projection(name):
    projection = torch.randn(2, 300, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    q, k, v = (projection[:, :, i].transpose(1, 2) for i in range(3))
    dout = torch.randn(2, 300, 4, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    assert faults(name, (q, k, v, dout), True) == []


@pytest.mark.parametrize("name", ["auto", CUDA])
def test_unaligned_views(name):
    """At an odd address, with odd strides: no tensor descriptor can reach it, no 16 bytes can be copied at once."""
    storage = torch.randn(2 * 2 * 200 * 67 + 1, device="cuda", dtype=torch.bfloat16)
    x = storage[1:].view(2, 2, 200, 67)[..., :64]
    assert faults(name, (x, x.flip(2), x.flip(0), x.flip(1)), True) == []


def test_tf32_is_as_exact_as_tf32_can_be(portable, random_inputs):
    inputs = random_inputs(queries=300, dtype=torch.float32)
    # bfloat16's own budget is the yardstick: tf32 keeps 10 bits of mantissa, bfloat16 7.
    low = [x.bfloat16() for x in inputs]
    exact = exact_attention(*inputs, causal=True)
    got = run_attention(partial(portable, fp32_precision="tf32"), *inputs, causal=True)
    rival = run_attention(reference, *low, causal=True)
    for mine, theirs, truth in zip(got, rival, exact, strict=True):
        assert (mine.double() - truth).norm() < 0.5 * (theirs.double() - truth).norm()


def like_a_trained_models(data, q, k, places):
    """(q, k) with large logits; with keys at these places 60 nats above the rest; with maxima that change in every
    tile, or never; with scores so low that 2^-score of a row that masked keys have no part in would be infinite."""
    size = q.shape[3] ** 0.5
    ramp = torch.linspace(0, 40, k.shape[2], device="cuda", dtype=k.dtype)[:, None] / size
    if data == "logits x 8":
        return q * 8, k
    if data == "very low":
        return q.abs() * 8, -k.abs() * 8
    if data.startswith("ramp"):
        return q.abs(), k + (ramp if data == "ramp up" else ramp.flip(0))
    k[:, :, places] = 60.0 / size
    return q.abs(), k


DATA = ["logits x 8", "sink", "late sink", "ramp up", "ramp down", "very low"]


@pytest.mark.parametrize(
    ("name", "data", "head_dim"),
    [
        *itertools.product(TRITON, ["logits x 8", "sink", "ramp up"], [64]),
        *(pytest.param("cuda", *case, marks=needs_nvcc) for case in itertools.product(DATA, [64, 128])),
    ],
)
def test_data_like_a_trained_models(name, data, head_dim, random_inputs):
    q, k, v, dout = random_inputs(queries=1000, head_dim=head_dim)
    q, k = like_a_trained_models(data, q, k, 500 if data == "late sink" else 3)
    assert faults(name, (q, k, v, dout), True) == []


@needs_nvcc
@pytest.mark.parametrize("scale", [0.7, -0.5, 0.0])
def test_a_scale_of_any_sign(scale, random_inputs):
    inputs = random_inputs(queries=200)
    assert faults_of(kernel_of("cuda"), reference, *inputs, causal=True, scale=scale) == []


FIRSTS = ["documents", "short documents", "long documents", "window", "both", "none"]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", FIRSTS)
@pytest.mark.parametrize("length", [129, 1000, 2304])
def test_first_equals_the_oracle(kernel, kind, length, head_dim, random_inputs):
    inputs = random_inputs(batch=2, queries=length, head_dim=head_dim)
    assert faults_of(kernel, reference, *inputs, causal=True, first=first_keys(kind, 2, length)) == []


@pytest.mark.parametrize(
    ("head_dim", "options"),
    [(80, {}), (256, {}), (64, {"deterministic": True}), (128, {"deterministic": True})],
    ids=str,
)
@pytest.mark.parametrize("kind", ["documents", "window"])
def test_first_with_grouped_heads(head_dim, options, kind, random_inputs):
    function = partial(attention_function("flash_triton"), **options)
    inputs = random_inputs(batch=2, heads=4, kv_heads=2, queries=700, head_dim=head_dim)
    first = first_keys(kind, 2, 700)
    assert faults_of(function, reference, *inputs, causal=True, first=first) == []


@pytest.mark.parametrize("kind", ["documents", "window"])
@pytest.mark.parametrize("data", ["logits x 8", "sink", "hidden sinks", "ramp up"])
def test_first_with_data_like_a_trained_models(kernel, kind, data, random_inputs):
    q, k, v, dout = random_inputs(queries=1000)
    first = first_keys(kind, 1, 1000)
    # Of each text the first key, or the last, which the next query no longer sees. Not key 0, too: with two such keys
    # a query's gradient is what rounding leaves of their difference.
    places = first[0].long().unique()
    q, k = like_a_trained_models(data, q, k, places[1:] - 1 if data == "hidden sinks" else places)
    assert faults_of(kernel, reference, q, k, v, dout, causal=True, first=first) == []


SAME_BITS = [
    ("portable", {}, FP32, 64),
    ("portable", {}, BF16, 64),
    ("auto", {"deterministic": True}, BF16, 64),
]
SAME_BITS += [pytest.param("cuda", {}, BF16, head_dim, marks=needs_nvcc) for head_dim in (64, 128)]


@both_masks
@pytest.mark.parametrize(("name", "options", "dtype", "head_dim"), SAME_BITS, ids=str)
def test_the_same_bits_on_every_run(name, options, dtype, head_dim, causal, random_inputs):
    kernel = partial(kernel_of(name), **options)
    inputs = random_inputs(batch=4, heads=8, kv_heads=2, queries=3000, head_dim=head_dim, dtype=dtype)
    first = run_attention(kernel, *inputs, causal=causal)
    for _ in range(20):
        again = run_attention(kernel, *inputs, causal=causal)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_addresses_past_two_to_the_31(portable):
    q, k, v = (torch.randn(1, 1, 129, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    # 70,000 query heads with a stride of 40,000 elements, all on one key head: the last begins at 2.8 * 10^9.
    storage = torch.zeros(70_000 * 40_000, device="cuda", dtype=torch.float16)
    far = storage.as_strided((1, 70_000, 129, 64), (0, 40_000, 64, 1))
    far[:, -1] = q[:, 0]
    out = portable(far, k, v, causal=True)[:, -1:]
    # The same bits come of the same tiles only: with a batch stride of 0 this call, too, goes without descriptors.
    near = q.as_strided(q.shape, (0, *q.stride()[1:]))
    assert torch.equal(out, portable(near, k, v, causal=True))


@pytest.mark.parametrize("name", ["auto", CUDA])
def test_compile_sees_no_graph_break(name, random_inputs):
    function = attention_function("flash_cuda" if name == "cuda" else "flash_triton")
    options = {} if name == "cuda" else {"deterministic": True}
    inputs, compiled = random_inputs(queries=300), torch.compile(function, fullgraph=True)
    eager, traced = (run_attention(partial(f, **options), *inputs, causal=True) for f in (function, compiled))
    assert all(torch.equal(a, b) for a, b in zip(eager, traced, strict=True))


@pytest.mark.parametrize("name", ["portable", CUDA])
def test_runs_inside_a_cuda_graph(name, random_inputs):
    kernel, (*inputs, dout) = kernel_of(name), random_inputs(queries=300)
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


@pytest.mark.parametrize("name", ["portable", CUDA])
def test_memory_is_linear_in_the_length(name, random_inputs):
    q, k, v, dout = random_inputs(batch=1, heads=1, queries=65_536)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run_attention(kernel_of(name), q, k, v, dout, causal=True)
    one_tensor = q.numel() * q.element_size()
    # out, three gradients, log-sum-exp and delta, flash_cuda's float32 sum of dq (two), and a few temporaries; the
    # scores would be 8 GiB.
    assert torch.cuda.max_memory_allocated() - before < 12 * one_tensor


@pytest.mark.parametrize(
    ("name", "head_dim", "dtype"),
    [("auto", 512, BF16), ("hopper", 20, BF16),
     *(pytest.param("cuda", *case, marks=needs_nvcc) for case in [(136, BF16), (20, FP16), (64, FP32)])],
)  # fmt: skip
def test_refusals_name_what_is_supported(name, head_dim, dtype, random_inputs):
    said = (FP32 if dtype == FP32 else head_dim,)
    with raises(UsageError, "attention.unsupported", *said):
        kernel_of(name)(*random_inputs(head_dim=head_dim, dtype=dtype)[:3], causal=True)
