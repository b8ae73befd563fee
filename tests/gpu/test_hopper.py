"""The Hopper kernels against float64, on shapes, layouts and values that break careless kernels.

Budgets: the result's rounding to 16 bits alone costs 1.7e-3 (bf16) of ‖reference‖; rounding P, dS and O on
the way brings a good kernel to 2.0e-3 to 2.8e-3 on normal inputs, cuDNN as well. 4e-3 passes those and
fails zeros (1), a scale 2% off (1e-2 and more), a mask one off (1e-2 at these lengths) and a skipped tile.
"""

import importlib
import math

import pytest
import torch
from attention_oracle import exact_attention, first_keys

from lmkit.core.attention import flash_forward as tiled_forward

pytestmark = pytest.mark.gpu

BUDGET = 4e-3
SAME = [(n, n) for n in (1, 127, 129, 1000, 2500, 3072)]
OTHER = [(300, 1000), (1000, 300), (64, 2048), (2048, 64)]
HARD_LENGTHS = [700, 2500]  # with head_dim 64 two consumers, three
WIDTHS = [64, 128, 256]  # heads as wide as the kernels are written for
NARROWER = [40, 72, 80, 96, 136]  # heads that TMA fills up to one of these
SHAPES = [(*lengths, head_dim) for lengths in SAME + OTHER for head_dim in WIDTHS]
SHAPES += [(*lengths, head_dim) for lengths in [(1, 1), (129, 129), *OTHER[:2]] for head_dim in NARROWER]


@pytest.fixture(scope="module")
def hopper():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not a Hopper GPU")
    from lmkit.kernels import hopper

    return hopper


def draw(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda", dtype=dtype)


def poison():
    """Fills what the allocator hands out next with NaN, so that unwritten outputs show."""
    torch.full((32 << 20,), math.nan, device="cuda")


def error(result, expected):
    """‖result - expected‖ / ‖expected‖ over what is finite in the expectation; infinite where finiteness
    differs."""
    finite = torch.isfinite(expected)
    if not torch.equal(torch.isfinite(result), finite):
        return math.inf
    difference = (result.double() - expected)[finite].norm()
    return (difference / expected[finite].norm().clamp_min(1e-6)).item()


def check(hopper, q, k, v, dout, *, causal, scale, ways=(False, True)):
    """Forward, and backward in both ways (deterministic or not), on poisoned memory; returns out and log-sum-exp."""
    poison()
    out, lse = hopper.forward(q, k, v, causal=causal, scale=scale)
    exact_out, *expected = exact_attention(q, k, v, dout, causal=causal, scale=scale)
    assert error(out, exact_out) < BUDGET
    for deterministic in ways:
        poison()
        results = hopper.backward(
            dout, q, k, v, out, lse, causal=causal, scale=scale, deterministic=deterministic
        )
        for result, exact in zip(results, expected, strict=True):
            if k.shape[2] == 1:  # dQ and dK are exactly 0 in exact arithmetic: only rounding of delta is left
                assert (result.double() - exact).abs().max() < 0.05
            else:
                assert error(result, exact) < BUDGET
    return out, lse


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys", "head_dim"), SHAPES)
def test_forward_and_backward(hopper, queries, keys, head_dim, causal, dtype):
    q, dout = (draw(2, 3, queries, head_dim, dtype=dtype) for _ in range(2))
    k, v = (draw(2, 3, keys, head_dim, dtype=dtype) for _ in range(2))
    assert hopper.unsupported_reason(q, k, v) is None
    _, lse = check(hopper, q, k, v, dout, causal=causal, scale=head_dim**-0.5)
    _, expected = tiled_forward(q.double(), k.double(), v.double(), causal, head_dim**-0.5)
    assert (lse.double() - expected).abs().max() < 1e-4  # float32 sums of 2^(fused products)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [*WIDTHS, *NARROWER])
@pytest.mark.parametrize(("queries", "keys"), [(640, 640), (300, 1000), (1000, 300)])
def test_shared_key_heads(hopper, queries, keys, head_dim, causal):
    # 22 heads of few tiles, of which 16 or more start together: also a last, smaller company
    q, k, v = draw(2, 44, queries, head_dim), draw(2, 11, keys, head_dim), draw(2, 11, keys, head_dim)
    check(hopper, q, k, v, draw(2, 44, queries, head_dim), causal=causal, scale=head_dim**-0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [96, 128])
@pytest.mark.parametrize(
    ("queries", "keys"), [(2047, 2047), (2048, 2048), (2111, 3001), (3001, 2049), (3001, 777)]
)
def test_long_fast_backward_with_shared_key_heads(hopper, queries, keys, head_dim, dtype):
    q, dout = (draw(2, 4, queries, head_dim, dtype=dtype) for _ in range(2))
    k, v = (draw(2, 2, keys, head_dim, dtype=dtype) for _ in range(2))
    check(hopper, q, k, v, dout, causal=False, scale=head_dim**-0.5, ways=(False,))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [*WIDTHS, *NARROWER])
def test_slices_of_a_fused_projection_with_shared_key_heads(hopper, head_dim, causal):
    x = draw(2, 777, 16, head_dim)  # 8 query heads, 2 key heads, 2 value heads, and room
    q, k, v = x[:, :, :8].transpose(1, 2), x[:, :, 8:10].transpose(1, 2), x[:, :, 10:12].transpose(1, 2)
    dout = draw(2, 777, 8, head_dim).transpose(1, 2)
    out, _ = check(hopper, q, k, v, dout, causal=causal, scale=0.1)
    assert out.stride(1) == head_dim  # heads side by side, as q's are


def inside_nan(tensor, columns):
    """The same values as the first columns of a wider tensor, whose other columns are NaN."""
    wider = tensor.new_full((*tensor.shape[:3], columns), math.nan)
    wider[..., : tensor.shape[3]] = tensor
    return wider[..., : tensor.shape[3]]


@pytest.fixture
def written_beyond(monkeypatch):
    """Has the launchers' tensors allocated inside of larger ones, full of NaN, and counts what is not NaN around
    them."""
    room, buffers = 512, []

    def empty_strided(shape, strides, *, dtype, device):
        size = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        buffers.append(torch.full((size + 2 * room,), math.nan, dtype=dtype, device=device))
        return buffers[-1].as_strided(shape, strides, room)

    monkeypatch.setattr(torch, "empty_strided", empty_strided)
    return lambda: sum(int((~x[:room].isnan()).sum() + (~x[-room:].isnan()).sum()) for x in buffers)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", NARROWER)
def test_columns_beyond_the_head_are_not_touched(hopper, written_beyond, head_dim, causal, deterministic):
    # Whole tiles of queries and keys: what follows a tensor's last row is hidden by no other limit
    columns, scale = 256, head_dim**-0.5
    q, k, v, dout = (inside_nan(draw(2, heads, 384, head_dim), columns) for heads in (4, 2, 2, 4))
    out, lse = hopper.forward(q, k, v, causal=causal, scale=scale)
    exact_out, *expected = exact_attention(q, k, v, dout, causal=causal, scale=scale)
    assert error(out, exact_out) < BUDGET
    results = hopper.backward(
        dout, q, k, v, inside_nan(out, columns), lse, causal=causal, scale=scale, deterministic=deterministic
    )
    assert max(map(error, results, expected)) < BUDGET
    assert written_beyond() == 0


@pytest.mark.parametrize("head_dim", [*WIDTHS, *NARROWER, 48, 56, 88, 104, 112, 120, 192, 248])
def test_flash_triton_takes_these_kernels(hopper, head_dim):
    from lmkit.attention.flash_triton import implementation_for

    projection = draw(2, 100, 3, 4, head_dim)
    q, k, v = (projection[:, :, i].transpose(1, 2) for i in range(3))
    assert implementation_for(q, k, v) == "hopper"


RAMPS = {"ramp up": 1, "ramp down": -1, "cliffs": -10}  # cliffs: 600 nats between neighbouring blocks
NOT_FINITE = {"NaN": math.nan, "infinite": -math.inf}
NAMES = ["logits times 8", "sink", *RAMPS, "times 1e4", "NaN key", "NaN query", "NaN value", "infinite key",
         "infinite query"]  # fmt: skip


def adversary(name, q, k, v, scale):
    """Inputs whose row maxima are not where a static reference expects them, or that are not finite."""
    length = q.shape[2]
    kind, _, of = name.partition(" ")
    if name == "logits times 8":
        q *= 8
    elif name == "sink":
        k[:, :, 0] = 0
        k[:, :, 0, 0] = 60 / scale / 8
        q[..., 0] = 8
    elif name in RAMPS:
        ramp = torch.linspace(0, 60, length, device="cuda")
        ramp = ramp if RAMPS[name] > 0 else ramp.flip(0)
        k[..., 0] = abs(RAMPS[name]) * ramp.to(k.dtype) / scale / 8
        q[..., 0] = 8
    elif name == "times 1e4":
        for x in (q, k, v):
            x *= 1e4
    else:
        {"query": q, "key": k, "value": v}[of][:, :, length // 3] = NOT_FINITE[kind]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", WIDTHS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", HARD_LENGTHS)
def test_forward_on_hard_values(hopper, length, name, head_dim, causal):
    if causal and name == "NaN value":
        pytest.skip("a dense reference spreads 0 * NaN to rows that do not see the value")
    scale = head_dim**-0.5
    q, k, v = (draw(1, 4, length, head_dim) for _ in range(3))
    adversary(name, q, k, v, scale)
    out, _ = hopper.forward(q, k, v, causal=causal, scale=scale)
    assert error(out, exact_attention(q, k, v, None, causal=causal, scale=scale)[0]) < BUDGET


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "length", "deterministic"),
    [
        *((head_dim, 2048, True) for head_dim in [*WIDTHS, 80]),
        *((head_dim, length, False) for head_dim in (64, 96, 128) for length in (1000, 2048)),
    ],
)
def test_backward_repeats_every_bit(hopper, head_dim, length, deterministic, causal):
    # Fast, dQ alone is added up in the order of arrival: that warp groups overtake each other may not show elsewhere
    heads = 8 if deterministic else 32
    q, k, v, dout = (draw(2, heads, length, head_dim) for _ in range(4))
    options = {"causal": causal, "scale": 0.1}
    out, lse = hopper.forward(q, k, v, **options)
    runs = [
        hopper.backward(dout, q, k, v, out, lse, **options, deterministic=deterministic)[not deterministic :]
        for _ in range(20)
    ]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("kind", ["window", "documents", "short documents"])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize(("length", "heads", "key_heads"), [(1404, 16, 16), (5000, 8, 4), (130, 4, 2)])
def test_tiles_that_ctas_draw(hopper, length, heads, key_heads, head_dim, kind):
    # More tiles than SMs, and fewer; which CTA draws a tile shows in no bit but dQ's, which is added up
    q, dout = draw(2, heads, length, head_dim), draw(2, heads, length, head_dim)
    k, v = draw(2, length, 2 * key_heads, head_dim).transpose(1, 2).chunk(2, 1)
    options = {"causal": True, "scale": head_dim**-0.5, "first": first_keys(kind, 2, length)}
    poison()
    out, lse = hopper.forward(q, k, v, **options)
    exact, *expected = exact_attention(q, k, v, dout, **options)
    assert error(out, exact) < BUDGET
    for deterministic in (False, True):
        poison()
        runs = [
            hopper.backward(dout, q, k, v, out, lse, **options, deterministic=deterministic) for _ in range(5)
        ]
        assert max(map(error, runs[0], expected)) < BUDGET
        for run in runs[1:]:
            assert all(map(torch.equal, run[1:], runs[0][1:]))
    assert all(torch.equal(hopper.forward(q, k, v, **options)[0], out) for _ in range(5))


@pytest.mark.parametrize("stock", [True, False])
@pytest.mark.parametrize("kind", ["window", "documents"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_graphs_that_run_at_once_draw_all_tiles(hopper, monkeypatch, head_dim, kind, stock):
    # Two graphs of one stream, replayed on two: each call has a counter of its own, made before the capture or in it
    forward = importlib.import_module("lmkit.kernels.hopper.forward")
    graphs, results = [], []
    first = first_keys(kind, 1, 5000)
    options = {"causal": True, "scale": 0.1, "first": first}
    for seed in range(2):
        torch.manual_seed(seed)
        q, k, v, dout = (draw(1, 8, 5000, head_dim) for _ in range(4))
        out, lse = hopper.forward(q, k, v, **options)
        eager = out, *hopper.backward(dout, q, k, v, out, lse, **options, deterministic=False)
        if not stock:
            monkeypatch.setattr(forward, "_STOCK", {q.device: []})
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                out, lse = hopper.forward(q, k, v, **options)
                made = out, *hopper.backward(dout, q, k, v, out, lse, **options, deterministic=False)
        graphs.append(graph)
        results.append((eager, made, (q, k, v, dout, lse)))
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for eager, made, _ in results:
        assert torch.equal(made[0], eager[0])
        assert all(map(torch.equal, made[2:], eager[2:]))
        assert error(made[1], eager[1].double()) < BUDGET


def test_more_than_2_to_31_elements(hopper):
    # 560,000 heads, 2.3e9 elements: past 2^31, and past the 65,535 blocks of a grid's second axis
    q, k, v, dout = (torch.randn(40000, 14, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    out, lse = hopper.forward(q, k, v, causal=True, scale=0.125)
    gradients = hopper.backward(dout, q, k, v, out, lse, causal=True, scale=0.125, deterministic=False)
    expected = exact_attention(*(x[-1:, -2:] for x in (q, k, v, dout)), causal=True, scale=0.125)
    assert max(error(x[-1:, -2:], e) for x, e in zip((out, *gradients), expected, strict=True)) < BUDGET


def test_unsupported_requests_say_why(hopper):
    for head_dim in (32, 100, 264):  # slower than the portable kernels, unaligned rows, too wide
        q = draw(1, 2, 64, head_dim)
        assert f"head_dim is {head_dim}" in hopper.unsupported_reason(q, q, q)
    q = draw(1, 2, 64, 64)
    assert "dtypes" in hopper.unsupported_reason(q.float(), q, q)
    assert "strides" in hopper.unsupported_reason(draw(1, 2, 64, 65)[..., 1:], q, q)
    assert "no queries" in hopper.unsupported_reason(q[:, :, :0], q, q)
    wide = draw(1, 2, 64, 72)  # the same shape and strides twice: an address is looked at in every call
    assert hopper.unsupported_reason(wide[..., 8:], wide[..., 8:], wide[..., 8:]) is None
    assert "addresses" in hopper.unsupported_reason(wide[..., 8:], wide[..., 7:71], wide[..., 8:])
