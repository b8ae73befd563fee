"""The fused kernels of a training step in Triton's interpreter; the checks are in step_checks.py."""

import pytest
import torch
from marking import full_but

pytest.importorskip("triton", reason="Triton is not installed")

import step_checks as checks

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize(
    "dtype", full_but([torch.float32], [torch.float32, torch.float16, torch.bfloat16]), ids=str
)
@pytest.mark.parametrize("name", checks.CASES)
def test_results_and_gradients(name, dtype):
    checks.check_case(name, dtype, "cpu")


@pytest.mark.parametrize("name", checks.CASES)
def test_faults_are_seen(name):
    checks.check_faults_are_seen(name, "cpu")


@pytest.mark.parametrize("name", full_but(["norm", "rope", "swiglu", "embedding"], checks.CASES))
def test_any_layout(name):
    checks.check_layouts(name, "cpu")


@pytest.mark.parametrize(
    "name", full_but({*checks.CHECKS} - {"cross_entropy_scales_float16_late"}, checks.CHECKS)
)
def test_fused(name):
    checks.CHECKS[name]("cpu")
