"""AdamW and Muon do what `torch.optim` promises: beside PyTorch's own classes, step for step."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from lmkit.core.adamw import AdamW as CoreAdamW
from lmkit.core.muon import Muon as CoreMuon
from lmkit.optim import AdamW, Muon

OURS = pytest.mark.parametrize("ours", [CoreAdamW, AdamW], ids=["core", "optim"])
MUONS = pytest.mark.parametrize("ours", [CoreMuon, Muon], ids=["core", "optim"])
SETTINGS = {"lr": 0.01, "betas": (0.8, 0.97), "eps": 1e-6, "weight_decay": 0.2}


def model_of(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def take_steps(model, optimizer, steps=5, scheduler=None):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 4, generator=generator).double()).square().sum().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def pair(ours, make=lambda cls, params: cls(params, **SETTINGS)):
    """Two equal models, with PyTorch's AdamW and with ours."""
    models = model_of(), model_of()
    return [(m, make(cls, m.parameters())) for m, cls in zip(models, (torch.optim.AdamW, ours), strict=True)]


def assert_alike(both, tolerance=1e-12):  # float64: the same sums, two roundings an update
    torch.testing.assert_close(weights(both[0][0]), weights(both[1][0]), rtol=tolerance, atol=tolerance)


@OURS
def test_settings_by_position_and_by_name(ours):
    both = pair(ours, lambda cls, params: cls(params, 0.01, (0.8, 0.97), 1e-6, 0.2))
    for model, optimizer in both:
        take_steps(model, optimizer)
    assert_alike(both)
    with pytest.raises(TypeError, match="amsgrad"):
        ours(model_of().parameters(), amsgrad=True)
    with pytest.raises(ValueError, match="empty"):
        ours([])


SCHEDULES = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    "cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.05, total_steps=6),  # betas, too
}


@OURS
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_of_pytorch(ours, schedule):
    both = pair(ours)
    for model, optimizer in both:
        take_steps(model, optimizer, scheduler=SCHEDULES[schedule](optimizer))
    assert_alike(both)


@OURS
@pytest.mark.parametrize("way", ["ours into torch", "torch into ours", "deepcopy", "pickle", "file"])
def test_the_state_goes_on_elsewhere(ours, way):
    (theirs, theirs_optimizer), (mine, mine_optimizer) = both = pair(ours)
    for model, optimizer in both:
        take_steps(model, optimizer, 3)
    if way == "ours into torch":
        theirs_optimizer.load_state_dict(copy.deepcopy(mine_optimizer.state_dict()))
    elif way == "torch into ours":
        mine_optimizer.load_state_dict(copy.deepcopy(theirs_optimizer.state_dict()))
    elif way == "file":
        file = io.BytesIO()
        torch.save(mine_optimizer.state_dict(), file)
        file.seek(0)
        mine_optimizer = ours(mine.parameters(), **SETTINGS)
        mine_optimizer.load_state_dict(torch.load(file))
    else:
        given = (mine, mine_optimizer)
        mine, mine_optimizer = (
            copy.deepcopy(given) if way == "deepcopy" else pickle.loads(pickle.dumps(given))
        )
    for model, optimizer in ((theirs, theirs_optimizer), (mine, mine_optimizer)):
        take_steps(model, optimizer, 2)
    torch.testing.assert_close(weights(theirs), weights(mine), rtol=1e-12, atol=1e-12)


@OURS
def test_closures_hooks_groups_and_parameters_without_gradients(ours):
    both, seen = pair(ours), []
    for model, optimizer in both:
        mine = []
        extra = nn.Parameter(torch.ones(3).double())
        optimizer.add_param_group({"params": [extra], "lr": 0.5})
        optimizer.register_step_pre_hook(lambda *_, mine=mine: mine.append("before"))
        optimizer.register_step_post_hook(lambda *_, mine=mine: mine.append("after"))

        def closure(model=model, optimizer=optimizer, extra=extra):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4).double()).square().sum() + extra[0] ** 2
            loss.backward()
            return loss

        mine += [optimizer.step(closure).item() for _ in range(3)]
        model.register_parameter("extra", extra)
        model[0].weight.grad = None
        optimizer.step()
        seen.append(mine)
    assert seen[0][:6] == seen[1][:6] == ["before", "after"] * 3
    assert seen[0][6:9] == pytest.approx(seen[1][6:9], rel=1e-12)
    assert_alike(both)


@pytest.mark.parametrize("ours", [CoreAdamW, AdamW, CoreMuon, Muon])
def test_complex_parameters_are_refused(ours):
    parameter = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="complex"):
        ours([{"params": [parameter], "is_matrix": False}])


@MUONS
@pytest.mark.parametrize("shape", [(8, 8), (6, 10), (12, 5)])
def test_muon_is_pytorchs(ours, shape):
    """PyTorch orthogonalises in bfloat16, so directions differ by its rounding, 2^-8, over five iterations."""
    after = []
    for make in (
        lambda p: torch.optim.Muon([p], lr=0.02, weight_decay=0.1, momentum=0.95, eps=1e-15),
        lambda p: ours([{"params": [p], "is_matrix": True}], matrix_lr=0.02, weight_decay=0.1),
    ):
        generator = torch.Generator().manual_seed(0)
        matrix = nn.Parameter(torch.randn(shape, generator=generator))
        optimizer, before = make(matrix), matrix.detach().clone()
        for _ in range(3):
            matrix.grad = torch.randn(shape, generator=generator)
            optimizer.step()
        after.append(matrix.detach() - before)
    assert (after[0] - after[1]).norm() < 0.03 * after[0].norm()


@MUONS
def test_muon_needs_to_know_its_matrices(ours):
    with pytest.raises(ValueError, match="is_matrix"):
        ours(model_of().parameters())
    for parameter in (nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2, 2, 2))):
        with pytest.raises(ValueError, match="no matrix"):
            ours([{"params": [parameter], "is_matrix": True}])
    matrix = nn.Parameter(torch.ones(2, 2))
    muon, adamw = ours([{"params": [matrix], "is_matrix": True}]), torch.optim.AdamW([matrix])
    with pytest.raises(ValueError, match="is_matrix"):  # all its parameters would take AdamW's steps
        muon.load_state_dict(adamw.state_dict())
