"""The fused kernels of a training step on a GPU: the checks of the interpreter, and what only a device can show."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import step_cases as cases
import step_checks as checks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", checks.CASES)
def test_results_and_gradients(name, dtype):
    checks.check_case(name, dtype, "cuda")


@pytest.mark.parametrize("name", checks.CASES)
def test_any_layout(name):
    checks.check_layouts(name, "cuda")


@pytest.mark.parametrize("name", checks.CHECKS)
def test_fused(name):
    checks.CHECKS[name]("cuda")


USUAL = {
    "norm": cases.normed(4, 512, 768),
    "wide norm": cases.normed(2, 512, 4096),
    "norm of heads": cases.normed(4, 512, 12, 64),
    "rope": cases.rotated(4, 512, 12, 12, 64),
    "rope of grouped heads": cases.rotated(2, 512, 32, 8, 128),
    "swiglu": cases.Case(checks.swiglu.swiglu, checks.PLAIN.swiglu, [(2048, 2 * 2048)]),
    "cross-entropy": cases.headed(2000, 768, 50257, chunk=512, masked=[5]),
    "embedding": cases.looked_up((8, 512), 768, 5000, False),
    "embedding, sorted": cases.looked_up((8, 512), 768, 5000, True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", USUAL)
def test_usual_sizes(name, dtype):
    case = USUAL[name]
    assert checks.faults_of(case.fused, case.plain, *checks.inputs_of(case, dtype, "cuda")) == []


@pytest.mark.parametrize("name", ["norm", "norm of heads", "cross-entropy", "embedding, sorted"])
def test_the_same_bits_on_every_run(name):
    case = USUAL[name]
    with checks.deterministically("norm" in name):
        runs = [checks.run(case.fused, *checks.inputs_of(case, torch.bfloat16, "cuda")) for _ in range(3)]
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def test_arrays_of_more_than_2_to_the_31_elements():
    """Their last rows equal those of a small array."""
    rows, width = 2**20 + 3, 2048
    if torch.cuda.mem_get_info()[0] < 8 * rows * width * 2:
        pytest.skip("needs 35 GB of free memory")
    x = torch.randn(rows, width, dtype=torch.bfloat16, device="cuda")
    last = slice(-5, None)
    gain = torch.ones(width, device="cuda")
    total, normed = checks.norm.add_rms_norm(x, x, gain)
    assert torch.equal(normed[last], checks.norm.add_rms_norm(x[last], x[last], gain)[1])
    del total, normed
    assert torch.equal(checks.swiglu.swiglu(x)[last], checks.swiglu.swiglu(x[last]))
    table = torch.randn(1, 32, 2, device="cuda")
    small = checks.rope.rope_(x[last, None].clone(), table, 8)
    assert torch.equal(checks.rope.rope_(x[:, None], table, 8)[last], small)
