"""The kernels of a decode step in Triton's interpreter; the checks are in decode_checks.py."""

import pytest
import torch
from marking import full_but

pytest.importorskip("triton", reason="Triton is not installed")

import decode_checks as checks
import decode_draw_checks as draws

pytestmark = pytest.mark.interpreter


CASES = [*checks.PRODUCTS, *checks.ATTENDS]
OFTEN = [*checks.PRODUCTS[::3], *checks.ATTENDS[::4]]


@pytest.mark.parametrize("dtype", full_but([torch.float32], [torch.float32, torch.float16]), ids=str)
@pytest.mark.parametrize("case", full_but(OFTEN, CASES), ids=str)
def test_products_and_attention(case, dtype):
    check = checks.check_product if case in checks.PRODUCTS else checks.check_attend
    check(case, dtype, "cpu")


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=str)
def test_faults_of_products_and_attention_are_seen(case):
    is_product = case in checks.PRODUCTS
    check = checks.check_product_faults_are_seen if is_product else checks.check_attend_faults_are_seen
    check(case, "cpu")


@pytest.mark.parametrize("name", full_but(["greedy", "all", "top-p"], draws.SAMPLINGS))
def test_draws(name):
    draws.check_advance(name, "cpu")


@pytest.mark.full
@pytest.mark.parametrize("name", ["all", "top-p of top-k"])
def test_draws_follow_the_exact_probabilities(name):
    draws.check_draws_follow_probabilities(draws.SAMPLINGS[name], 150, "cpu")


@pytest.mark.full
@pytest.mark.parametrize("name", [*checks.CHECKS, *draws.CHECKS])
def test_step(name):
    (checks.CHECKS | draws.CHECKS)[name]("cpu")
