"""The kernels of a decode step on a GPU: the checks of the interpreter, and what only a device can show."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import decode_checks as checks
import decode_draw_checks as draws

pytestmark = pytest.mark.gpu
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
LARGE = [
    checks.Product("qkv", 1, 2048, 6144, "store", True),
    checks.Product("output", 1, 2048, 2048, "residual", False),
    checks.Product("gate_up", 16, 2048, 5504, "swiglu", True),
    checks.Product("down", 16, 5504, 2048, "residual", False),
    checks.Product("head", 1, 768, 50257, "logits", True),
    checks.Product("head", 16, 768, 50257, "logits", True),
]
LARGE += [case._replace(fp8=True) for case in LARGE]
LONG = [
    checks.Attend(16, 16, 128, 2048, (2000,)),
    checks.Attend(12, 12, 64, 2048, (2047,)),
    checks.Attend(16, 4, 128, 2048, (2000, 0, 1023, 256, 257)),
    checks.Attend(12, 12, 64, 2048, tuple(range(0, 2048, 127))),
]


@DTYPES
@pytest.mark.parametrize("case", [*checks.PRODUCTS, *LARGE], ids=str)
def test_products(case, dtype):
    checks.check_product(case, dtype, "cuda")


@DTYPES
@pytest.mark.parametrize("case", [*checks.ATTENDS, *LONG], ids=str)
def test_attention(case, dtype):
    checks.check_attend(case, dtype, "cuda")


@pytest.mark.parametrize("name", draws.SAMPLINGS)
def test_draws(name):
    draws.check_advance(name, "cuda")


@pytest.mark.parametrize("name", [*checks.CHECKS, *draws.CHECKS])
def test_step(name):
    (checks.CHECKS | draws.CHECKS)[name]("cuda")


@DTYPES
def test_a_row_has_the_same_bits_in_any_company(dtype):
    checks.check_products_ignore_company(dtype, "cuda")
    checks.check_attend_ignores_company(dtype, "cuda")


@pytest.mark.parametrize("name", ["all", "flat", "top-k", "top-p", "min-p", "top-p of top-k"])
def test_draws_follow_the_exact_probabilities(name):
    draws.check_draws_follow_probabilities(draws.SAMPLINGS[name], 20_000, "cuda")


@pytest.mark.parametrize("name", ["all", "top-k", "top-p of top-k"])
def test_draws_from_a_whole_vocabulary(name):
    """Four thousand draws from 50,257 logits equal the plain form's, but for weights that round otherwise."""
    sampling = draws.SAMPLINGS[name]
    mine, plain = (draws.batch(sampling, "cuda", rows=4096, vocab_size=50257) for _ in range(2))
    draws.run_advance(mine, sampling, 100)
    draws.plain_step(plain, sampling)
    # exp2 of the device and of PyTorch differ in the last place: of a 2^-23rd of a weight, some draws may see it.
    assert (mine.rows.drawn == plain.rows.drawn).float().mean() > 0.995
