"""fp8 on a GPU: casts bit for bit, products and steps against their simulation."""

from unittest import mock

import pytest
import torch

from lmkit.errors import UsageError
from lmkit.kernels import fp8 as kernels
from lmkit.kernels.launch import LaunchCache
from lmkit.kernels.swiglu import swiglu, swiglu_and_cast
from lmkit.model import SwiGLU, fp8
from lmkit.model.fused import Fused
from lmkit.model.transformer import joined_product
from lmkit.parallel.ranks import Ranks
from lmkit.recipe.tables import ModelConfig
from lmkit.training.setup import build_step

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _multiplies_fp8():
    try:
        fp8.check_fp8(torch.device("cuda"))
    except UsageError as error:
        pytest.skip(error.message)


def hard(rows, columns):
    """Rows of very different sizes: zeros, the smallest and largest numbers, one that is far above the others."""
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    x *= torch.logspace(-38, 30, rows, device="cuda", dtype=torch.float32).bfloat16()[:, None]
    x[rows // 2] = 0
    x[rows // 3, columns // 2] = 1e30
    return x


def assert_same(mine, theirs):
    """The same numbers in fp8 and the same scales, bit for bit."""
    assert torch.equal(mine[0].view(torch.uint8), theirs[0].view(torch.uint8))
    assert torch.equal(mine[1], theirs[1])


@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 16), (37, 512), (128, 2048), (100, 5504), (64, 11008), (3, 768)]
)
def test_casts_are_pytorchs_bit_for_bit(rows, columns):
    x = hard(rows, columns)
    for each in (x, torch.cat((x, x), 1)[:, columns:]):
        assert_same(kernels.cast_rows(each), kernels.plain_cast_rows(each))


@pytest.mark.parametrize(
    ("rows", "columns"), [(16, 16), (128, 64), (144, 80), (2048, 512), (688, 1376), (5504, 2048)]
)
def test_transposed_casts_are_pytorchs_bit_for_bit(rows, columns):
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    scale = x.float().abs().amax() / 448
    for each in (x, torch.cat((x, x), 1)[:, columns:]):
        assert_same(kernels.cast_transposed(each, scale), kernels.plain_cast_transposed(x, scale))


@pytest.mark.parametrize("d_ff", [64, 1376, 5504])
def test_swiglu_casts_what_it_computes(d_ff):
    data = torch.randn(2, 50, 2 * d_ff, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn(2, 50, d_ff, device="cuda", dtype=torch.bfloat16)
    found = []
    for function, is_leaf in ((swiglu, True), (swiglu_and_cast, True), (swiglu_and_cast, False)):
        joint = data.clone().requires_grad_()
        joint = joint if is_leaf else joint * 1  # then the gradient is written in the place of its input
        out = function(joint)
        (gradient,) = torch.autograd.grad(out, joint, grad)
        found.append((out.detach(), gradient))
        if function is swiglu_and_cast:
            for made in (out, gradient):
                assert_same(kernels.take_cast(made), kernels.plain_cast_rows(made.detach().flatten(0, -2)))
    for other in found[1:]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found[0], other, strict=True))


def test_casts_that_were_kept_are_used():
    """Forward and backward of a feed-forward network have the bits of one that casts everything anew."""
    torch.manual_seed(0)
    network = SwiGLU(1024, 1536, device="cuda", dtype=torch.bfloat16)
    assert fp8.use_fp8(network) == 2
    assert network.casts
    x = torch.randn(2, 64, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    found = []
    for keeps in (True, False):
        network.casts = keeps
        with mock.patch.object(
            LaunchCache, "__call__", autospec=True, side_effect=LaunchCache.__call__
        ) as launches:
            out = network.contract(joined_product(x, *network.joined_layers()), Fused())
            gradients = torch.autograd.grad(out, [x, *network.parameters()], torch.ones_like(out))
        casts = sum(call.args[0] is kernels.row_calls for call in launches.call_args_list)
        found.append((casts, out.detach(), *gradients))
    (few, *mine), (many, *theirs) = found
    # x, the gradient of the output, two weights; the result, the gradient of gate|up
    assert (few, many) == (4, 6)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_infinities_and_nan_are_seen():
    for bad in (float("inf"), float("nan")):
        x = torch.randn(64, 512, device="cuda", dtype=torch.bfloat16)
        x[1, 5] = bad
        w = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        out = fp8.fp8_linear(x, w)
        assert torch.isnan(out[1]).all()
        assert torch.isfinite(out[2:]).all()


@pytest.mark.parametrize(
    ("tokens", "columns", "rows"), [(2048, 1024, 3072), (1000, 2048, 1024), (17, 1024, 1040)]
)
def test_products_equal_their_simulation(tokens, columns, rows):
    x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(tokens, rows, device="cuda", dtype=torch.bfloat16)
    out = fp8.fp8_linear(x, w)
    got = (out, *torch.autograd.grad(out, (x, w), dy))
    (low_x, x_scale), (low_w, w_scale) = kernels.plain_cast_rows(x), kernels.plain_cast_rows(w)
    low_dy, dy_scale = kernels.plain_cast_rows(dy)
    low_t, t_scale = kernels.plain_cast_transposed(w, w_scale.amax())
    wanted = (
        fp8.simulate(low_x, low_w, x_scale, w_scale.view(1, -1)),
        fp8.simulate(low_dy, low_t, dy_scale, t_scale),
        dy.t() @ x,
    )
    for mine, theirs in zip(got, wanted, strict=True):
        # Tensor cores add fp8 products with about 14 bits, which they cut off; fp8's own error is 3.6e-2.
        difference = (mine.double() - theirs.double()).norm() / theirs.double().norm()
        assert difference < 1e-2


def test_a_step_in_a_graph_is_the_step_without(monkeypatch):
    monkeypatch.setattr(fp8, "FP8_LEAST_WIDTH", 128)
    config = ModelConfig(vocab_size=256, context_length=128, d_model=128, d_ff=384, num_layers=2, num_heads=2)
    config = config.changed(attention="flash_triton")
    torch.cuda.reset_peak_memory_stats()  # a graph may take as much as other tests took
    losses = []
    for cuda_graph in ("off", "on"):
        torch.manual_seed(0)
        step = build_step(config, Ranks(device=torch.device("cuda")), precision="fp8", cuda_graph=cuda_graph)
        generator = torch.Generator().manual_seed(1)
        for _ in range(8):
            ids = torch.randint(256, (1, 4, 129), generator=generator)
            outcome = step(ids[..., :-1], ids[..., 1:], lr=1e-3)
        losses.append(float(outcome.loss))
        note = "" if step.graph is None else step.graph.note
        assert note.startswith("CUDA graph: on") == (cuda_graph == "on"), note
    # Sums of dQ and of the embedding's gradient are added up in the order of arrival.
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
