"""Attention on a GPU, every implementation of flash_triton against the float64 oracle: values and gradients."""

from functools import partial

import pytest
import torch
from attention_oracle import exact_attention, faults_of
from raising import raises

from lmkit.attention import attention_function
from lmkit.attention.run import run_attention
from lmkit.core.attention import reference
from lmkit.errors import UsageError
from lmkit.kernels.flash import tuning

pytestmark = pytest.mark.gpu

# No length but the last is a multiple of 16 or 1, for which kernels are compiled anew: compiling is what takes time.
LENGTHS = [(127, 127), (129, 129), (1000, 300), (300, 1000)]


@pytest.fixture(autouse=True)
def _default_tilings(monkeypatch):
    """The first candidate of every case instead of the fastest: no tuning, and the same kernels in every run."""
    monkeypatch.setattr(tuning, "measure", lambda case, candidates, *rest: candidates[0])


@pytest.fixture(params=["portable", "auto"])
def kernel(request):
    """flash_triton with the portable kernels, and with whatever it picks on this chip."""
    return partial(attention_function("flash_triton"), implementation=request.param)


@pytest.fixture
def portable():
    return partial(attention_function("flash_triton"), implementation="portable")


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
def test_bfloat16_equals_the_oracle(kernel, queries, keys, head_dim, causal, random_inputs):
    inputs = random_inputs(queries=queries, keys=keys, head_dim=head_dim)
    assert faults_of(kernel, reference, *inputs, causal=causal) == []


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1024, 1024)])
def test_lengths_that_are_compiled_apart(kernel, queries, keys, random_inputs):
    inputs = random_inputs(queries=queries, keys=keys)
    assert faults_of(kernel, reference, *inputs, causal=True) == []


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [
        *((head_dim, torch.bfloat16) for head_dim in (16, 32, 40, 80, 96, 256)),
        (80, torch.float16),
        (64, torch.float32),
        (80, torch.float32),
    ],
    ids=str,
)
def test_every_head_dim_and_dtype(head_dim, dtype, random_inputs):
    inputs = random_inputs(queries=129, keys=200, head_dim=head_dim, dtype=dtype)
    assert faults_of(attention_function("flash_triton"), reference, *inputs, causal=True) == []


def test_portable_kernels_where_hopper_has_its_own(portable, random_inputs):
    inputs = random_inputs(queries=129, keys=200, head_dim=256)
    assert faults_of(portable, reference, *inputs, causal=True) == []


@pytest.mark.parametrize(
    ("kv_heads", "causal"), [(1, True), (2, False), (2, True)], ids=["1 causal", "2 full", "2 causal"]
)
def test_grouped_heads(kernel, kv_heads, causal, random_inputs):
    inputs = random_inputs(batch=2, heads=8, kv_heads=kv_heads, queries=300, head_dim=128)
    assert faults_of(kernel, reference, *inputs, causal=causal) == []


def test_views_of_one_projection(kernel):
    projection = torch.randn(2, 300, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    q, k, v = (projection[:, :, i].transpose(1, 2) for i in range(3))
    dout = torch.randn(2, 300, 4, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    assert faults_of(kernel, reference, q, k, v, dout, causal=True) == []


def test_unaligned_views():
    kernel = attention_function("flash_triton")
    storage = torch.randn(2 * 2 * 200 * 67 + 1, device="cuda", dtype=torch.bfloat16)
    # Odd address, odd strides: no tensor descriptor can reach it.
    x = storage[1:].view(2, 2, 200, 67)[..., :64]
    assert faults_of(kernel, reference, x, x.flip(2), x.flip(0), x.flip(1), causal=True) == []


def test_tf32_is_as_exact_as_tf32_can_be(portable, random_inputs):
    inputs = random_inputs(queries=300, dtype=torch.float32)
    # bfloat16's own budget is the yardstick: tf32 keeps 10 bits of mantissa, bfloat16 7.
    low = [x.bfloat16() for x in inputs]
    exact = exact_attention(*inputs, causal=True)
    got = run_attention(partial(portable, fp32_precision="tf32"), *inputs, causal=True)
    rival = run_attention(reference, *low, causal=True)
    for mine, theirs, truth in zip(got, rival, exact, strict=True):
        assert (mine.double() - truth).norm() < 0.5 * (theirs.double() - truth).norm()


@pytest.mark.parametrize("fault", ["logits x 8", "sink", "ramp"])
def test_data_like_a_trained_models(kernel, fault, random_inputs):
    q, k, v, dout = random_inputs(queries=1000, dtype=torch.bfloat16)
    if fault == "logits x 8":
        q = q * 8
    elif fault == "sink":  # one key 60 nats above the rest
        k[:, :, 3] = q.mean(dim=2) * 0 + 60.0 / 8.0
        q = q.abs()
    else:  # growing maxima: the running maximum changes in every tile
        k = k + torch.linspace(0, 40, 1000, device="cuda", dtype=k.dtype)[:, None] / 64**0.5
        q = q.abs()
    assert faults_of(kernel, reference, q, k, v, dout, causal=True) == []


def first_keys(kind, batch, length):
    """(batch, length) int32: the first key that each query sees, other documents in every text."""
    place = torch.arange(length, device="cuda").expand(batch, -1)
    starts = torch.zeros(batch, length, dtype=torch.bool, device="cuda")
    for b in range(batch):
        generator = torch.Generator().manual_seed(b)
        mean = {"documents": 100, "short documents": 7, "long documents": 700}.get(kind, 100)
        starts[b, torch.randperm(length, generator=generator)[: length // mean]] = True
    documents = torch.where(starts, place, 0).cummax(1).values
    window = (place - 99).clamp_min(0)
    first = {"window": window, "both": torch.maximum(window, documents), "none": 0 * place}
    return first.get(kind, documents).to(torch.int32)


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
@pytest.mark.parametrize("fault", ["logits x 8", "sink", "hidden sinks", "ramp"])
def test_first_with_data_like_a_trained_models(kernel, kind, fault, random_inputs):
    q, k, v, dout = random_inputs(queries=1000)
    first = first_keys(kind, 1, 1000)
    if fault == "logits x 8":
        q = q * 8
    elif fault == "ramp":  # growing maxima
        k = k + torch.linspace(0, 40, 1000, device="cuda", dtype=k.dtype)[:, None] / 64**0.5
        q = q.abs()
    else:  # keys far above the rest: of each text the first, or the last, which the next query no longer sees
        places = first[0].long().unique()
        # Not key 0, too: with two such keys a query's gradient is what rounding leaves of their difference.
        k[:, :, places[1:] - 1 if fault == "hidden sinks" else places] = 60.0 / 8.0
        q = q.abs()
    assert faults_of(kernel, reference, q, k, v, dout, causal=True, first=first) == []


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"implementation": "portable"}, torch.float32),
        ({"implementation": "portable"}, torch.bfloat16),
        ({"deterministic": True}, torch.bfloat16),
    ],
    ids=str,
)
def test_portable_and_deterministic_backward_give_the_same_bits(options, dtype, random_inputs):
    kernel = partial(attention_function("flash_triton"), **options)
    inputs = random_inputs(heads=8, kv_heads=2, queries=1000, dtype=dtype)
    first = run_attention(kernel, *inputs, causal=True)
    for _ in range(20):
        again = run_attention(kernel, *inputs, causal=True)
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


def test_compile_sees_no_graph_break(random_inputs):
    function = attention_function("flash_triton")
    inputs = random_inputs(queries=300)
    compiled = torch.compile(function, fullgraph=True)
    eager = run_attention(partial(function, deterministic=True), *inputs, causal=True)
    traced = run_attention(partial(compiled, deterministic=True), *inputs, causal=True)
    assert all(torch.equal(a, b) for a, b in zip(eager, traced, strict=True))


def test_runs_inside_a_cuda_graph(portable, random_inputs):
    q, k, v, _ = random_inputs(queries=300)
    expected = portable(q, k, v, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = portable(q, k, v, causal=True)
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)


def test_memory_is_linear_in_the_length(portable, random_inputs):
    q, k, v, dout = random_inputs(batch=1, heads=1, queries=65_536)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run_attention(portable, q, k, v, dout, causal=True)
    one_tensor = q.numel() * q.element_size()
    # out, three gradients, log-sum-exp and delta, and a few temporaries; the scores would be 8 GiB.
    assert torch.cuda.max_memory_allocated() - before < 12 * one_tensor


@pytest.mark.parametrize(("head_dim", "options"), [(512, {}), (20, {"implementation": "hopper"})])
def test_refusals_name_what_is_supported(head_dim, options, random_inputs):
    with raises(UsageError, "attention.unsupported", head_dim):
        attention_function("flash_triton")(*random_inputs(head_dim=head_dim)[:3], causal=True, **options)
