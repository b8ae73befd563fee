"""The fused kernels of a training step in Triton's interpreter; the checks are in step_checks.py."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
sys.path.insert(0, str(Path(__file__).parent))
checks = importlib.import_module("step_checks")

# The interpreter computes on masked lanes, too, and NumPy says so.
pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", checks.CASES)
def test_results_and_gradients(name, dtype):
    checks.check_case(name, dtype, "cpu")


@pytest.mark.parametrize("name", checks.CASES)
def test_faults_are_seen(name):
    checks.check_faults_are_seen(name, "cpu")


@pytest.mark.parametrize("name", checks.CASES)
def test_any_layout(name):
    checks.check_layouts(name, "cpu")


@pytest.mark.parametrize("name", checks.CHECKS)
def test_fused(name):
    checks.CHECKS[name]("cpu")


IDS = torch.tensor([[0, 2, 0, 1], [3, 0, 2, 4]])
TABLE = torch.stack((checks.tuned(4, 4).cos(), checks.tuned(4, 4).sin()), dim=-1)
OPERATORS = {
    "add_rms_norm": lambda x, w: (x, x, w[0], 1e-5, torch.float32),
    "rope": lambda x, w: (x, TABLE, 1, False),
    "swiglu": lambda x, w: (x,),
    "linear_cross_entropy": lambda x, w: (x[0], w, IDS[0], 3, True, True),
    "embedding": lambda x, w: (IDS, w),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_are_registered_in_full(name):
    x, w = checks.tuned(2, 4, 32), checks.tuned(5, 32, seed=1)
    arguments = [
        a.requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() and a is not TABLE else a
        for a in OPERATORS[name](x, w)
    ]
    torch.library.opcheck(getattr(torch.ops.lmkit, name).default, arguments)


def whole_step(weight, gain):
    """Every fused function, one after the other, with those around them that hand gradients on."""
    x = checks.embedding.embedding(IDS, weight)
    qkv = checks.rope.rope_(checks.norm.rms_norm(x, gain) * 1, TABLE, 1)
    x, y = checks.norm.add_rms_norm(x, qkv, gain)
    joint = torch.cat((y, y.sin()), dim=-1)
    _, y = checks.norm.add_rms_norm(x, checks.swiglu.swiglu(joint), gain)
    return checks.cross_entropy.linear_cross_entropy(y, weight, IDS)


@pytest.mark.parametrize("deterministic", [False, True])
def test_compiled_functions_equal_eager_ones(deterministic):
    """As one graph, twice: the second call must not see what the first has overwritten."""
    inputs, one = [checks.tuned(5, 32, seed=1), checks.tuned(32, seed=2)], [torch.ones(())]
    torch.compiler.reset()
    compiled = torch.compile(whole_step, backend="aot_eager", fullgraph=True)
    with checks.deterministically(deterministic):
        expected = checks.run(whole_step, inputs, one)
        for _ in range(2):
            for mine, other in zip(checks.run(compiled, inputs, one), expected, strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_compiled_functions_follow_the_dtypes_of_autocast():
    h, w = checks.tuned(6, 8).requires_grad_(), checks.tuned(5, 8, seed=1).requires_grad_()
    compiled = torch.compile(checks.cross_entropy.linear_cross_entropy, backend="aot_eager", fullgraph=True)
    losses = []
    for function in (checks.cross_entropy.linear_cross_entropy, compiled):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = function(h, w, IDS.flatten()[:6])
        gradients = torch.autograd.grad(loss, (h, w))
        assert [x.dtype for x in (loss, *gradients)] == [torch.float32] * 3
        losses.append(loss.detach())
    assert torch.equal(*losses)
