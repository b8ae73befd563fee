"""Every PyTorch kernel of the registry against the float64 oracle: values and gradients."""

import pytest
import torch
from attention_oracle import exact_attention, faults_of
from torch.utils.checkpoint import checkpoint

from lmkit.attention import attention_function, flash_torch
from lmkit.attention.accuracy import run_attention
from lmkit.attention.reference import reference
from lmkit.errors import UsageError
from lmkit.registry import ATTENTION

PYTORCH_KERNELS = ["reference", "vectorized", "flash_torch", "sdpa"]

# (queries, keys): one row, around the tile size, both ways rectangular.
LENGTHS = [(1, 1), (127, 127), (129, 129), (129, 37), (37, 129), (1, 200), (200, 1)]


@pytest.fixture(params=PYTORCH_KERNELS)
def kernel(request):
    return attention_function(request.param)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
def test_fault_82_any_lengths_equal_the_oracle(kernel, queries, keys, causal, random_inputs):
    inputs = random_inputs(queries=queries, keys=keys, head_dim=16)
    assert faults_of(kernel, reference, *inputs, causal=causal) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_low_precision_stays_within_the_budget(kernel, dtype, causal, random_inputs):
    inputs = random_inputs(queries=129, head_dim=64, dtype=dtype)
    assert faults_of(kernel, reference, *inputs, causal=causal) == []


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_grouped_heads_share_their_keys(kernel, kv_heads, causal, random_inputs):
    inputs = random_inputs(heads=6, kv_heads=kv_heads, queries=33, keys=40)
    assert faults_of(kernel, reference, *inputs, causal=causal) == []


def test_fault_84_strided_inputs(kernel, random_inputs):
    # As a model makes them: slices of one projection, (batch, seq, 3, heads, head_dim).
    projection = torch.randn(2, 65, 3, 4, 32, generator=torch.Generator().manual_seed(0))
    q, k, v = (projection[:, :, i].transpose(1, 2) for i in range(3))
    dout = torch.randn(2, 65, 4, 32, generator=torch.Generator().manual_seed(1)).transpose(1, 2)
    assert not q.is_contiguous()
    assert faults_of(kernel, reference, q, k, v, dout, causal=True) == []


def test_explicit_scale(kernel, random_inputs):
    inputs = random_inputs(queries=20)
    assert faults_of(kernel, reference, *inputs, causal=True, scale=0.7) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_a_scale_that_is_not_positive(kernel, scale, dtype, random_inputs):
    """Masked scores are minus infinity after it, not before."""
    inputs = random_inputs(queries=20, dtype=dtype)
    assert faults_of(kernel, reference, *inputs, causal=True, scale=scale) == []


@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 0},
        {"queries": 0, "keys": 5},
        {"queries": 5, "keys": 0},
        {"batch": 0, "heads": 4, "kv_heads": 2},
        {"queries": 0, "keys": 5, "heads": 4, "kv_heads": 2},
    ],
    ids=["no batch", "no queries", "no keys", "no batch, grouped heads", "no queries, grouped heads"],
)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_fault_84_nothing_in_gives_zeros_out(kernel, sizes, causal, random_inputs):
    q, k, v, dout = random_inputs(**sizes)
    out, dq, dk, dv = run_attention(kernel, q, k, v, dout, causal=causal)
    for got, like in ((out, q), (dq, q), (dk, k), (dv, v)):
        assert got.shape == like.shape
        assert not got.any()


@pytest.mark.parametrize("batch", [2, 0])
@pytest.mark.parametrize(("heads", "kv_heads", "group"), [(4, 2, 2), (0, 0, 0)])
def test_the_log_sum_exp_of_flash_torch_is_grouped_by_key_head(batch, heads, kv_heads, group):
    q, k = torch.randn(batch, heads, 5, 8), torch.randn(batch, kv_heads, 7, 8)
    out, lse = flash_torch.forward(q, k, k, True, 1.0)
    assert (out.shape, lse.shape) == (q.shape, (batch, kv_heads, group, 5))


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_row_that_sees_no_key_gives_zeros_whatever_is_in_it(kernel, value, random_inputs):
    q, k, v, dout = random_inputs(queries=5, keys=0)
    q[0, 0, 2] = dout[1, 1, 3] = value
    out, dq, dk, dv = run_attention(kernel, q, k, v, dout, causal=True)
    assert not out.any()
    assert not dq.any()
    assert dk.shape == k.shape
    assert dv.shape == v.shape


@pytest.mark.parametrize("factor", [8.0, 1e4], ids=["logits x 8", "inputs x 1e4"])
def test_large_logits_stay_finite(kernel, factor, random_inputs):
    q, k, v, _ = random_inputs(queries=130)
    (exact,) = exact_attention(q * factor, k, v, None, causal=True)
    got = kernel(q * factor, k, v, causal=True)
    # A score is rounded to about |score| * 2^-24; exp turns that into a relative error of its weight.
    tolerance = 2e-6 * factor
    torch.testing.assert_close(got.double(), exact, atol=tolerance, rtol=tolerance)


def test_nan_reaches_exactly_the_rows_that_see_it(kernel, random_inputs):
    q, k, v, _ = random_inputs(queries=300)
    k[0, 0, 150] = torch.nan
    out = kernel(q, k, v, causal=True)
    assert out[0, 0, 150:].isnan().all()
    assert out[0, 0, :150].isfinite().all()
    assert out[0, 1].isfinite().all()
    assert out[1].isfinite().all()


def test_autocast_casts_mixed_inputs(kernel, random_inputs):
    q, k, v, dout = random_inputs(queries=20)
    q.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = kernel(q, k, v.bfloat16(), causal=True)
    assert out.dtype == torch.bfloat16
    out.backward(dout.bfloat16())
    assert q.grad.dtype == torch.float32


def test_autocast_leaves_float64_alone(kernel, random_inputs):
    q, k, v, _ = random_inputs(queries=20, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = kernel(q, k, v, causal=True)
        with pytest.raises(ValueError, match="one dtype"):
            kernel(q, k.float(), v, causal=True)
    assert torch.equal(inside, kernel(q, k, v, causal=True))


def test_activation_checkpointing_changes_nothing(kernel, random_inputs):
    q, k, v, dout = random_inputs(queries=33)

    def recomputed(q, k, v, *, causal):
        return checkpoint(kernel, q, k, v, causal=causal, use_reentrant=False)

    for plain, again in zip(
        run_attention(kernel, q, k, v, dout, causal=True),
        run_attention(recomputed, q, k, v, dout, causal=True),
        strict=True,
    ):
        assert torch.equal(plain, again)


def test_flash_torch_passes_gradcheck(random_inputs):
    inputs = [
        x.requires_grad_() for x in random_inputs(batch=1, queries=5, head_dim=3, dtype=torch.float64)[:3]
    ]
    kernel = attention_function("flash_torch")
    assert torch.autograd.gradcheck(lambda q, k, v: kernel(q, k, v, causal=True), inputs)


def test_flash_torch_never_holds_the_scores(random_inputs):
    """The largest tensor that flash_torch makes is linear in the sequence length."""
    from torch.utils._python_dispatch import TorchDispatchMode

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
        ((2, 4, 5), (2, 4, 5), (2, 4, 5)),
        ((1, 2, 5, 8), (1, 2, 5, 8), (1, 2, 6, 8)),
        ((1, 2, 5, 8), (1, 2, 5, 16), (1, 2, 5, 16)),
        ((1, 3, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8)),
        ((2, 2, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8)),
    ],
    ids=["three axes", "k and v differ", "head_dim differs", "heads no multiple", "batch differs"],
)
def test_shapes_that_do_not_fit_are_refused(kernel, q, k, v):
    with pytest.raises(ValueError, match=r"\(2, 4, 5\)|differ|multiple|must be"):
        kernel(torch.randn(q), torch.randn(k), torch.randn(v), causal=True)


def test_mixed_dtypes_are_refused_without_autocast(kernel, random_inputs):
    q, k, v, _ = random_inputs(queries=5)
    with pytest.raises(ValueError, match="one dtype"):
        kernel(q, k, v.double(), causal=True)


@pytest.mark.parametrize("theirs", ["scaled_dot_prod_attention", "vectorized_torch"])
def test_spellings_that_recipes_accept_are_found_too(theirs):
    assert attention_function(theirs) is attention_function(ATTENTION.canonical(theirs))


def test_unknown_name_lists_what_exists():
    with pytest.raises(UsageError) as caught:
        attention_function("flash_cuda")
    assert "flash_cuda" in caught.value.message
    for name in ATTENTION.names:
        assert name in caught.value.hint
