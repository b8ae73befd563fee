"""Muon: its orthogonalisation against an SVD in float64, its step against the formula, what it leaves to AdamW."""

import copy
import math
import pickle

import pytest
import torch
from muon_oracle import by_svd, check_refused_steps

from lmkit.core import muon as core
from lmkit.core.muon import move, orthogonalize
from lmkit.optim.adamw import AdamW
from lmkit.optim.muon import Muon, _dtype_of_products
from lmkit.recipe.tables import ModelConfig, OptimizerConfig
from lmkit.training.setup import build_step

CONFIG = ModelConfig(vocab_size=50, context_length=16, d_model=16, d_ff=24, num_layers=2, num_heads=2)


@pytest.mark.parametrize("shape", [(8, 8), (5, 17), (17, 5), (1, 9)])
@pytest.mark.parametrize("iterations", [1, 5])
def test_singular_values_follow_the_polynomial(shape, iterations):
    torch.manual_seed(0)
    matrices = torch.randn(3, *shape, dtype=torch.float64) * torch.tensor([1e-9, 1.0, 1e9])[:, None, None]
    found = orthogonalize(matrices, iterations=iterations)
    for one, matrix in zip(found, matrices, strict=True):
        # Rounding of float64, multiplied by at most 3.4445 in each iteration.
        torch.testing.assert_close(one, by_svd(matrix, iterations), rtol=1e-9, atol=1e-9)


def test_zeros_stay_zero():
    assert not orthogonalize(torch.zeros(2, 3, 4)).any()


@pytest.mark.parametrize("scale", [1e-20, 1e-24, 1e-37, 1e-42])
def test_fault_178_a_momentum_that_fades_away_stays_finite(scale):
    torch.manual_seed(0)
    # Without gradients a momentum of 1 is 1e-24 after 1080 steps. The norm of such elements is 0 in float32.
    assert orthogonalize(scale * torch.randn(3, 8, 16)).abs().max() < 1.21


@pytest.mark.parametrize("has_bf16", [False, True])
def test_cpus_with_bf16_multiply_in_it(monkeypatch, has_bf16):
    monkeypatch.setattr("lmkit.optim.muon.has_bf16", lambda device: has_bf16)
    torch.manual_seed(0)
    matrices = torch.randn(2, 24, 40)
    exact = orthogonalize(matrices.double())
    found = orthogonalize(matrices, dtype=_dtype_of_products.__wrapped__(matrices.device, matrices.dtype))
    assert found.dtype == torch.float32
    # Rounding of float32, or of bf16: 2^-9 of a singular value near 1, over 15 products.
    error = (found - exact).norm(dim=(-2, -1)).max() / exact.norm(dim=(-2, -1)).min()
    assert 1e-3 < error < 3e-2 if has_bf16 else error < 1e-5


@pytest.mark.parametrize("make", [core.Muon, Muon])
def test_equals_the_formula(make):
    """Matrices of two shapes; float64, so that rounding hides nothing."""
    torch.manual_seed(0)
    shapes = (6, 4), (4, 4), (6, 4), (10, 4)
    *matrices, other = (torch.nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes)
    groups = [{"params": matrices, "is_matrix": True}, {"params": [other], "is_matrix": False}]
    options = {"lr": 0.01, "matrix_lr": 0.05, "momentum": 0.8}
    optimizer = make([group | {"weight_decay": 0.3} for group in groups], **options)
    like_other = torch.nn.Parameter(other.detach().clone())
    adamw = AdamW([like_other], lr=0.01, weight_decay=0.3)
    exact = [matrix.detach().clone() for matrix in matrices]
    means = [torch.zeros_like(matrix) for matrix in exact]
    for step in range(4):
        for group in (*optimizer.param_groups, *adamw.param_groups):
            group["lr"] = 0.01 * (step + 1)
        for param in (*matrices, other):
            param.grad = torch.randn_like(param)
        like_other.grad = other.grad
        factor = 0.5**step if make is Muon else 1.0  # the core has no factor
        optimizer.gradient_factor = adamw.gradient_factor = torch.tensor(factor)
        optimizer.step()
        adamw.step()
        rate = 0.05 * (step + 1)
        for weight, mean, matrix in zip(exact, means, matrices, strict=True):
            gradient = matrix.grad * factor
            mean.mul_(0.8).add_(0.2 * gradient)
            direction = by_svd(0.8 * mean + 0.2 * gradient, 5)
            weight.sub_(rate * 0.3 * weight).sub_(rate * math.sqrt(max(1, len(weight) / 4)) * direction)
    for matrix, weight in zip(matrices, exact, strict=True):
        torch.testing.assert_close(matrix.detach(), weight, rtol=1e-9, atol=1e-9)  # as above
    assert torch.equal(other, like_other)
    assert set(optimizer.state[matrices[0]]) == {"momentum_buffer"}


@pytest.mark.parametrize("make", [core.Muon, Muon])
def test_groups_have_learning_rates_of_their_own(make):
    """Matrices begin with `matrix_lr`, the group's or the optimizer's, whatever `lr` the group begins with."""
    weights = [torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.float64)) for _ in range(3)]
    own = ({"lr": 0.02}, {"matrix_lr": 0.5}, {"lr": 0.1, "matrix_lr": 0.3})
    groups = [
        {"params": [weight], "is_matrix": True, **keys} for weight, keys in zip(weights, own, strict=True)
    ]
    optimizer = make(groups[:2], lr=1e-3, matrix_lr=0.05, weight_decay=0.0)
    optimizer.add_param_group(groups[2])
    for factor in (1, 0.5):
        for group, lr in zip(optimizer.param_groups, (0.02, 1e-3, 0.1), strict=True):
            group["lr"] = lr * factor
        before = [weight.detach().clone() for weight in weights]
        for weight in weights:
            weight.grad = torch.eye(4, dtype=torch.float64)
        optimizer.step()
        moved = [(old - new).diagonal().mean().item() for old, new in zip(before, weights, strict=True)]
        unit = moved[0] / (0.05 * factor)  # an orthogonalised direction, about 1
        assert moved == pytest.approx([rate * factor * unit for rate in (0.05, 0.5, 0.3)], rel=1e-9)
        assert 0.5 < unit < 1.5
    with pytest.raises(ValueError, match="lr must not be 0"):
        optimizer.add_param_group(
            {"params": [torch.nn.Parameter(torch.zeros(2, 2))], "is_matrix": True, "lr": 0.0}
        )


def stepped(optimizer, weight):
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    return weight.detach().clone()


@pytest.mark.parametrize("make", [core.Muon, Muon])
def test_a_copy_and_a_loaded_state_go_on_as_the_optimizer_does(make):
    """Also with other settings: the state has its own."""
    first = torch.nn.Parameter(torch.randn(6, 4))
    optimizer = make([{"params": [first], "is_matrix": True}], lr=1e-3, matrix_lr=0.05, momentum=0.8)
    stepped(optimizer, first)
    for copy_of in (copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))):
        copied = copy_of((optimizer, first))
        loaded = torch.nn.Parameter(first.detach().clone())
        other = make([{"params": [loaded], "is_matrix": True}], lr=1e-4, iterations=3)
        other.load_state_dict(optimizer.state_dict())
        pairs = [(optimizer, first), copied, (other, loaded)]
        ends = [stepped(*pair) for pair in pairs]
        assert torch.equal(ends[0], ends[1])
        assert torch.equal(ends[0], ends[2])


def test_a_learning_rate_on_the_device_moves_weights_by_the_same_bits():
    """A CUDA graph reads it there, as float64."""
    weight = torch.randn(3, 50, 20, generator=torch.Generator().manual_seed(0))
    optimizer = Muon([{"params": [weight[0]], "is_matrix": True}], lr=1e-3, weight_decay=0.13)
    optimizer.decision = torch.ones(())
    group = optimizer.param_groups[0]
    for number in range(1, 50):
        moved = []
        for lr in (1e-3 / number, torch.tensor(1e-3 / number, dtype=torch.float64)):
            group["lr"] = lr
            moved.append(weight.clone())
            rate, decay = optimizer._rates(group)
            move(moved[-1], weight.flip(0), rate * 2.5**0.5, decay)
        assert torch.equal(*moved)


def test_a_refused_step_changes_nothing():
    check_refused_steps("cpu")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_blocks_get_muon_and_the_rest_adamw(precision):
    torch.manual_seed(0)
    step = build_step(CONFIG, optimizer=OptimizerConfig(name="muon", lr=3e-3), precision=precision)
    for batch in torch.randint(50, (3, 1, 4, 17)):
        step(batch[..., :-1], batch[..., 1:], lr=3e-3)
    model = step.model
    muon = {p for p, state in step.optimizer.state.items() if "momentum_buffer" in state}
    adamw = {p for p, state in step.optimizer.state.items() if "exp_avg" in state}
    assert muon == {p for p in model.layers.parameters() if p.dim() == 2}
    assert adamw == set(model.parameters()) - muon
    for weight in muon:
        assert weight.dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)
        assert step.optimizer.state[weight]["momentum_buffer"].dtype == torch.float32
