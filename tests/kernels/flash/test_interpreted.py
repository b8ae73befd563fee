"""The portable kernels, in Triton's interpreter, against the float64 oracle: values and gradients.

tests/attention/test_attention.py has what every attention kernel must do.

float32 and float16 only: the interpreter multiplies the raw bits of bfloat16. bfloat16 is tested on the GPU.
"""

import pytest
import torch
from attention_oracle import draw_inputs, faults_of
from marking import full_but, full_except
from raising import raises

pytest.importorskip("triton", reason="Triton is not installed")

from lmkit.attention import FlashAttention, FlashAttentionTriton
from lmkit.attention.flash_triton import flash_triton
from lmkit.attention.run import run_attention
from lmkit.core.attention import reference
from lmkit.errors import UsageError
from lmkit.kernels.flash import tuning
from lmkit.kernels.flash.backward import last_queries
from lmkit.kernels.flash.tuning import Tiling

pytestmark = pytest.mark.interpreter


@pytest.fixture
def with_tiling(monkeypatch):
    """flash_triton with tile sizes of the test's choice."""

    def choose(rows, columns, **options):
        monkeypatch.setattr(tuning, "_chosen", {})
        monkeypatch.setattr(tuning, "INTERPRETER_TILING", Tiling(rows, columns, warps=4, stages=1, **options))
        return flash_triton

    return choose


def firsts(queries):
    """What hides keys of two texts of so many tokens: a window, documents, both; one document is a token."""
    place = torch.arange(queries)
    starts = torch.tensor([0, 1, 20, 21, 50, queries - 1])
    documents = starts[torch.searchsorted(starts, place, right=True) - 1]
    return {
        "window of 1": place.expand(2, -1),
        "window of 5": (place - 4).clamp_min(0)[None],  # of all texts
        "window of 40": (place - 39).clamp_min(0).expand(2, -1),
        "documents": torch.stack([documents, torch.zeros_like(place)]),
        "both": torch.maximum(torch.stack([documents, place * 0]), (place - 24).clamp_min(0)),
    }


@pytest.mark.parametrize("name", full_but(["both"], firsts(90)))
@pytest.mark.parametrize(
    ("rows", "columns", "options"),
    full_except((32, 32, {}), (16, 64, {"apart": True}), (64, 16, {"split": True})),
)
def test_first_hides_keys_in_any_tile(name, rows, columns, options, with_tiling):
    """Against float64: queries that see nothing of a tile, tiles that nobody sees, a large key that few see."""
    q, k, v, dout = draw_inputs(batch=2, heads=2, kv_heads=1, queries=90, head_dim=24)
    k[:, :, 3] *= 10
    first = firsts(90)[name].to(torch.int32).contiguous()
    attention = with_tiling(rows, columns, **options)
    got = run_attention(attention, q, k, v, dout, causal=True, first=first)
    want = run_attention(reference, *(x.double() for x in (q, k, v, dout)), causal=True, first=first)
    for mine, exact in zip(got, want, strict=True):
        # float32 sums of up to 90 products, of scores up to about 30.
        largest = max(1.0, float(exact.abs().max()))
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=3e-5 * largest)


@pytest.mark.full
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("rows", "columns", "keys"), [(16, 32, 20), (32, 16, 64), (64, 16, 70), (16, 64, 70)]
)
@pytest.mark.parametrize(
    "options", [{}, {"split": True, "registers": True, "apart": True}], ids=["", "apart"]
)
def test_any_tile_shape(rows, columns, keys, options, causal, with_tiling):
    inputs = draw_inputs(heads=4, kv_heads=2, queries=70, keys=keys, head_dim=24)
    attention = with_tiling(rows, columns, **options)
    assert faults_of(attention, reference, *inputs, causal=causal) == []


@pytest.mark.full
@pytest.mark.parametrize("split", [False, True], ids=["padded", "split"])
@pytest.mark.parametrize("head_dim", [1, 8, 24, 32, 40, 80, 96])
def test_any_head_dim(head_dim, split, with_tiling):
    inputs = draw_inputs(queries=33, keys=40, head_dim=head_dim)
    assert faults_of(with_tiling(32, 32, split=split), reference, *inputs, causal=True) == []


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", full_but([40], [32, 40]))
def test_tensor_descriptors(head_dim, causal, with_tiling):
    inputs = draw_inputs(heads=4, kv_heads=2, queries=65, keys=50, head_dim=head_dim, dtype=torch.float16)
    attention = with_tiling(32, 16, descriptors=True)
    assert faults_of(attention, reference, *inputs, causal=causal) == []


def test_views_of_one_projection_give_a_view_that_is_contiguous():
    """As a model goes on with it: (batch, seq, heads, head_dim)."""
    q, k, v = (part.transpose(1, 2) for part in torch.randn(2, 40, 3, 2, 32).unbind(2))
    assert flash_triton(q, k, v, causal=True).transpose(1, 2).is_contiguous()


def test_the_log_sum_exp_and_the_gradients_are_those_of_flash_torch():
    q, k, v, dout = (x.requires_grad_() for x in draw_inputs(heads=4, kv_heads=2, queries=33))
    outs = FlashAttentionTriton.apply(q, k, v, True)[0], FlashAttention.apply(q, k, v, True)
    saved = [out.grad_fn.saved_tensors[-1] for out in outs]
    assert saved[0].shape == saved[1].shape == (1, 4, 33)
    gradients = [torch.autograd.grad(out, (q, k, v), dout) for out in outs]
    for mine, theirs in [outs, saved, *zip(*gradients, strict=True)]:
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)  # float32, sums over 33 keys


def test_rows_with_a_stride_and_broadcast_gradients():
    q, k, v, dout = draw_inputs(queries=20, head_dim=32)
    q = q.repeat_interleave(2, dim=3)[..., ::2]  # innermost stride 2
    dout = dout[..., :1].expand_as(dout)  # innermost stride 0, as sum() makes it
    assert faults_of(flash_triton, reference, q, k, v, dout, causal=True) == []


@pytest.mark.full
# torch 2.15: opcheck itself reads .grad of a tensor that is not a leaf
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_operators_keep_their_promises():
    q, k, v, _ = (x.requires_grad_() for x in draw_inputs(heads=4, kv_heads=2, queries=20, keys=30))
    torch.library.opcheck(
        torch.ops.lmkit.flash_attention_forward.default, (q, k, v, True, 0.25, "auto", False, "ieee")
    )


@pytest.mark.full
def test_a_second_derivative_is_refused():
    """The backward kernels have none; without a word autograd would leave its terms out."""
    q, k, v, dout = (x.requires_grad_() for x in draw_inputs(queries=20))
    operator = torch.ops.lmkit.flash_attention_forward.default
    for outside in (dout.detach(), dout):  # a constant, as behind a loss, or part of the graph
        for wanted in (q, v):  # autograd runs only what lies on the way to it
            for out in (
                flash_triton(q, k, v, causal=True),
                operator(q, k, v, True, 0.25, "auto", False, "ieee")[0],
            ):
                (gradient,) = torch.autograd.grad(out, q, outside, create_graph=True)
                with pytest.raises(RuntimeError, match="differentiable once"):
                    torch.autograd.grad(out.sum() + gradient.square().sum(), wanted)


@pytest.mark.parametrize(
    ("inputs", "options", "code", "named"),
    [
        ({"dtype": torch.bfloat16}, {}, "attention.unsupported", "bfloat16"),
        ({"dtype": torch.float64}, {}, "attention.unsupported", "float64"),
        ({"head_dim": 257}, {}, "attention.unsupported", "257"),
        ({}, {"implementation": "hopper"}, "attention.unsupported", "hopper"),
        ({}, {"implementation": "cuda"}, "attention.unknown_implementation", "cuda"),
    ],
)
def test_what_is_not_supported_is_refused(inputs, options, code, named):
    with raises(UsageError, code, named):
        flash_triton(*draw_inputs(**inputs)[:3], causal=True, **options)


@pytest.mark.parametrize("name", firsts(90))
@pytest.mark.parametrize("keys", [90, 600])
def test_last_queries_are_those_of_a_search(name, keys):
    first = firsts(90)[name].to(torch.int32).contiguous()
    sees = first[:, :, None] <= torch.arange(keys)
    assert torch.equal(last_queries(first, keys), (sees.sum(1) - 1).to(torch.int32))
