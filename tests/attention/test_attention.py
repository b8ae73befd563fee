"""The kernels that a CPU runs against the float64 oracle: values and gradients; the public `attention`.

PyTorch's kernels, and flash_triton in Triton's interpreter, which multiplies the raw bits of bfloat16: that is tested
on the GPU.
"""

import math
from functools import partial

import pytest
import torch
from attention_oracle import draw_inputs, exact_attention, faults_of
from marking import full_but
from raising import raises
from torch.utils._python_dispatch import TorchDispatchMode

from lmkit.attention import FlashAttention, attention, attention_function, dispatch, sdpa
from lmkit.attention.run import run_attention
from lmkit.core.attention import reference
from lmkit.errors import UsageError
from lmkit.registry import ATTENTION

random_inputs = partial(draw_inputs, batch=2)
PYTORCH_KERNELS = ["reference", "vectorized", "flash_torch", "sdpa"]
MASKED_KERNELS = ["reference", "vectorized", "sdpa"]

# (queries, keys): one row, around the tile size, both ways rectangular.
LENGTHS = [(1, 1), (37, 129), (1, 150)]
MORE_LENGTHS = [(150, 1), (129, 37), (127, 127), (129, 129)]

both_masks = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@pytest.fixture(params=PYTORCH_KERNELS)
def pytorch_kernel(request):
    return attention_function(request.param)


@pytest.fixture(params=[*PYTORCH_KERNELS, pytest.param("flash_triton", marks=pytest.mark.interpreter)])
def kernel(request):
    return attention_function(request.param)


SHAPES = [
    *({"queries": queries, "keys": keys, "head_dim": 16} for queries, keys in LENGTHS),
    {"queries": 129, "head_dim": 64, "dtype": torch.bfloat16},
    {"heads": 4, "kv_heads": 2, "queries": 33, "keys": 40},
]
MORE_SHAPES = [
    *({"queries": queries, "keys": keys, "head_dim": 16} for queries, keys in MORE_LENGTHS),
    {"queries": 65, "head_dim": 64, "dtype": torch.float16},
    {"heads": 3, "kv_heads": 1, "queries": 33, "keys": 40},
]


@both_masks
@pytest.mark.parametrize("sizes", full_but(SHAPES, SHAPES + MORE_SHAPES), ids=str)
def test_fault_82_any_lengths_equal_the_oracle(kernel, sizes, causal):
    """Any dtype and grouped heads, too."""
    if sizes.get("dtype") == torch.bfloat16 and kernel.__name__ == "flash_triton":
        pytest.skip("the interpreter multiplies the raw bits of bfloat16")
    assert faults_of(kernel, reference, *random_inputs(**sizes), causal=causal) == []


def test_strided_inputs(kernel):
    # As a model makes them: slices of one projection, (batch, seq, 3, heads, head_dim).
    projection = torch.randn(2, 65, 3, 2, 32, generator=torch.Generator().manual_seed(0))
    q, k, v = (projection[:, :, i].transpose(1, 2) for i in range(3))
    dout = torch.randn(2, 65, 2, 32, generator=torch.Generator().manual_seed(1)).transpose(1, 2)
    assert not q.is_contiguous()
    assert faults_of(kernel, reference, q, k, v, dout, causal=True) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [0.7, -0.5, 0.0])
def test_a_scale_of_any_sign(kernel, scale, dtype):
    """Masked scores are minus infinity after scaling, not before."""
    inputs = random_inputs(queries=20, dtype=dtype)
    assert faults_of(kernel, reference, *inputs, causal=True, scale=scale) == []


NOTHING = [{"batch": 0, "heads": 4, "kv_heads": 2}, {"queries": 0, "keys": 5, "heads": 4, "kv_heads": 2}]


@both_masks
@pytest.mark.parametrize("sizes", [*NOTHING, {"queries": 5, "keys": 0}], ids=str)
def test_nothing_in_gives_zeros_out(kernel, sizes, causal):
    """Also where a row that sees no key holds what is not finite."""
    q, k, v, dout = random_inputs(**sizes)
    if q.numel():
        q[0, 0, 2], dout[1, 1, 3] = torch.inf, torch.nan
    tensors = run_attention(kernel, q, k, v, dout, causal=causal)
    for got, like in zip(tensors, (q, q, k, v), strict=True):
        assert got.shape == like.shape
        assert not got.any()


@pytest.mark.parametrize("factor", [8.0, 1e4], ids=["logits x 8", "inputs x 1e4"])
def test_large_logits_stay_finite(kernel, factor):
    q, k, v, _ = random_inputs(queries=130)
    (exact,) = exact_attention(q * factor, k, v, None, causal=True)
    got = kernel(q * factor, k, v, causal=True)
    # A score is rounded to about |score| * 2^-24; exp turns that into a relative error of its weight.
    tolerance = 2e-6 * factor
    torch.testing.assert_close(got.double(), exact, atol=tolerance, rtol=tolerance)


def test_nan_reaches_exactly_the_rows_that_see_it(kernel):
    q, k, v, _ = random_inputs(queries=140)
    k[0, 0, 70] = torch.nan
    out = kernel(q, k, v, causal=True)
    assert out[0, 0, 70:].isnan().all()
    out[0, 0, 70:] = 0
    assert out.isfinite().all()


def test_autocast_casts_mixed_inputs_but_not_float64(pytorch_kernel):
    q, k, v, dout = random_inputs(queries=20)
    q.requires_grad_()
    wide = [x.detach().double() for x in (q, k, v)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = pytorch_kernel(q, k, v.bfloat16(), causal=True)
        inside = pytorch_kernel(*wide, causal=True)
        with pytest.raises(ValueError, match="one dtype"):
            pytorch_kernel(wide[0], k, v, causal=True)
    assert out.dtype == torch.bfloat16
    out.backward(dout.bfloat16())
    assert q.grad.dtype == torch.float32
    assert torch.equal(inside, pytorch_kernel(*wide, causal=True))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 4), (0, 0)])
@pytest.mark.parametrize("batch", [2, 0])
def test_flash_attention_saves_the_log_sum_exp_of_every_row(batch, heads, kv_heads):
    torch.manual_seed(0)
    q, k = torch.randn(batch, heads, 5, 8), torch.randn(batch, kv_heads, 7, 8)
    out = FlashAttention.apply(q.requires_grad_(), k, k)
    lse = out.grad_fn.saved_tensors[-1]
    assert (out.shape, lse.shape) == (q.shape, (batch, heads, 5))
    if kv_heads:
        scores = q @ k.repeat_interleave(heads // kv_heads, dim=1).mT / math.sqrt(8)
        torch.testing.assert_close(lse, scores.logsumexp(dim=-1), rtol=1e-5, atol=1e-5)  # float32 sums of 7


def test_flash_attention_without_the_axis_of_heads():
    q, k, v = (torch.randn(3, 7, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    out = FlashAttention.apply(q, k, v, True)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, expected)
    assert [x.shape for x in out.grad_fn.saved_tensors] == [q.shape] * 4 + [q.shape[:-1]]
    dout = torch.randn_like(out)
    for mine, theirs in zip(*(torch.autograd.grad(x, (q, k, v), dout) for x in (out, expected)), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(
    "shapes", [((2, 5, 8), (2, 4, 5, 8)), ((5, 8), (5, 8)), ((2, 4, 5, 8), (2, 3, 5, 8))]
)
def test_flash_attention_checks_shapes_where_they_enter(shapes):
    q, k = map(torch.ones, shapes)
    with pytest.raises(ValueError, match="q"):
        FlashAttention.apply(q, k, k, True)


def test_flash_torch_never_holds_the_scores():
    """The largest tensor that flash_torch makes is linear in the sequence length."""

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                self.elements = max(self.elements, out.numel())
            return out

    q, k, v, dout = random_inputs(batch=1, heads=1, queries=1024, head_dim=16)
    with Largest() as largest:
        run_attention(attention_function("flash_torch"), q, k, v, dout, causal=True)
    assert largest.elements <= 1024 * 16  # the inputs themselves; a tile is 128 x 128


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((2, 4, 5),) * 3,  # three axes
        ((1, 2, 5, 8), (1, 2, 5, 8), (1, 2, 6, 8)),  # k and v differ
        ((1, 2, 5, 8), (1, 2, 5, 16), (1, 2, 5, 16)),  # in head_dim
        ((1, 3, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8)),  # heads are no multiple
        ((2, 2, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8)),  # in batch
    ],
)
def test_shapes_that_do_not_fit_are_refused(kernel, q, k, v):
    with pytest.raises(ValueError, match=r"\(2, 4, 5\)|differ|multiple|must be"):
        kernel(torch.randn(q), torch.randn(k), torch.randn(v), causal=True)
    x = torch.randn(1, 1, 5, 8)
    with pytest.raises(ValueError, match="one dtype"):
        kernel(x, x, x.double(), causal=True)


# Masks of one's own


def by_hand(q, k, v, visible):
    """softmax(q k^T / sqrt(d)) v over the visible keys of each row, in loops; zeros where there is none."""
    out = torch.zeros_like(q)
    visible = visible.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    for b, h, i in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        keys = visible[b, h, i].nonzero().flatten()
        if len(keys):
            group = h // (q.shape[1] // k.shape[1])
            weights = torch.softmax(k[b, group, keys] @ q[b, h, i] / math.sqrt(q.shape[3]), dim=0)
            out[b, h, i] = weights @ v[b, group, keys]
    return out


@both_masks
@pytest.mark.parametrize("shape", [(7, 9), (9,), (2, 1, 7, 9), (1, 4, 7, 1), (2, 4, 7, 9)], ids=str)
@pytest.mark.parametrize("name", MASKED_KERNELS)
def test_a_mask_hides_keys(name, shape, causal):
    torch.manual_seed(1)
    mask = torch.rand(shape) > 0.4
    if mask.dim() > 1:
        mask[..., 3, :] = False  # a row that sees nothing
    q, k, v, dout = random_inputs(heads=4, kv_heads=2, queries=7, keys=9, dtype=torch.float64)
    visible = mask & torch.ones(7, 9, dtype=torch.bool).tril() if causal else mask

    def masked(q, k, v):
        return attention(q, k, v, causal, mask, kernel=name)

    got = run_attention(masked, q, k, v, dout)
    want = run_attention(lambda q, k, v: by_hand(q, k, v, visible), q, k, v, dout)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)  # float64, other order of sums


def test_integers_a_scale_with_gradients_and_a_mask_as_causal_are_refused():
    q, k, v, _ = random_inputs(queries=5, keys=5)
    for kernel in PYTORCH_KERNELS:
        with pytest.raises(ValueError, match="floating-point"):
            attention(q.long(), k.long(), v.long(), kernel=kernel)
        with pytest.raises(TypeError, match="scale"):
            attention(q, k, v, scale=torch.tensor(0.5, requires_grad=True), kernel=kernel)
        with pytest.raises(TypeError, match="mask="):
            attention(q, k, v, torch.ones(5, 5, dtype=torch.bool), kernel=kernel)


@pytest.mark.parametrize("name", MASKED_KERNELS)
def test_a_mask_of_another_kind_or_shape_is_refused(name):
    q, k, v, _ = random_inputs(queries=7, keys=9)
    for mask in (torch.zeros(7, 9), torch.ones(9, 7, dtype=torch.bool), torch.ones(1, 1, 1, 1, 9) > 0):
        with pytest.raises(ValueError, match="mask"):
            attention(q, k, v, mask=mask, kernel=name)


@pytest.mark.parametrize(
    ("batch", "dtype"), [(1, torch.float64), (2, torch.float64), (2, torch.bfloat16)], ids=str
)
def test_first_hides_the_keys_before_it(pytorch_kernel, batch, dtype):
    """Windows, and documents that differ between rows; some begin inside a tile, some hide whole tiles."""
    q, k, v, dout = random_inputs(heads=2, kv_heads=1, queries=140, head_dim=4, dtype=dtype)
    place = torch.arange(140)
    window = (place - 9).clamp_min(0)
    documents = torch.stack([place // 75 * 75, torch.where(place < 130, 0, 130)])
    first = torch.maximum(window, documents) if batch == 2 else window[None]
    visible = (place >= first[..., None])[:, None] & (place <= place[:, None])
    exact = (x.double() for x in (q, k, v, dout))
    want = run_attention(lambda q, k, v: by_hand(q, k, v, visible), *exact)
    got = run_attention(
        lambda q, k, v: pytorch_kernel(q, k, v, causal=True, first=first.int()), q, k, v, dout
    )
    # bfloat16 has 8 bits of mantissa; sums of at most ten products.
    close = {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 0.05, "atol": 0.05}
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine.double(), theirs, **close)
    for wrong, causal in ((first, False), (first[:, 1:], True), (first[0], True)):
        with pytest.raises(ValueError, match="first"):
            pytorch_kernel(q, k, v, causal=causal, first=wrong)


# The public function


@pytest.mark.parametrize("name", [*PYTORCH_KERNELS, "auto"])
def test_one_head_needs_no_axis(name):
    q, k, v, _ = random_inputs(heads=1, queries=7, keys=9)
    mask = torch.rand(2, 7, 9) > 0.3
    flat = [x.squeeze(1) for x in (q, k, v)]
    options = {"causal": True, "scale": 0.3, "kernel": name}
    assert torch.equal(attention(*flat, **options), attention(q, k, v, **options).squeeze(1))
    if name == "auto" or ATTENTION.facts(name).masks:
        out = attention(*flat, mask=mask, kernel=name)
        assert torch.equal(out, attention(q, k, v, mask=mask[:, None], kernel=name).squeeze(1))


def test_auto_takes_the_first_that_supports_the_call(monkeypatch):
    q, k, v, _ = random_inputs(queries=7)
    assert torch.equal(attention(q, k, v, True), sdpa(q, k, v, causal=True))
    monkeypatch.setattr(dispatch, "PREFERRED", ("flash_triton", "flash_torch", "sdpa"))
    q.requires_grad_()
    assert "FlashAttention" in attention(q, k, v).grad_fn.name()  # flash_triton needs CUDA
    mask = torch.ones(7, 7, dtype=torch.bool)
    assert torch.equal(attention(q, k, v, mask=mask), sdpa(q, k, v, causal=False, mask=mask))


def test_a_kernel_without_masks_names_those_that_take_one():
    q, k, v, _ = random_inputs(queries=7)
    with raises(UsageError, "attention.no_mask") as caught:
        attention(q, k, v, mask=torch.ones(7, 7) > 0, kernel="flash_torch")
    assert all(name in caught.value.hint for name in MASKED_KERNELS)


def test_options_reach_the_kernel():
    q, k, v, _ = random_inputs(queries=7)
    flash = attention(q, k, v, causal=True, kernel="sdpa", **ATTENTION.facts("sdpa").variants["flash"])
    torch.testing.assert_close(flash, reference(q, k, v, causal=True), rtol=1e-5, atol=1e-6)  # float32
    with pytest.raises(RuntimeError, match=r"No (available|viable)"):
        attention(q, k, v, kernel="sdpa", backend="cudnn")
    with raises(UsageError, "attention.unknown_backend", hint="cudnn"):
        attention(q, k, v, kernel="sdpa", backend="nonesuch")
