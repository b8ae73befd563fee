"""The optimizer `adamw_host`: AdamW's steps, its state in the host's memory, and what a plan counts of it."""

import copy

import pytest
import torch

from lmkit.measure.environment import CARDS
from lmkit.optim import AdamW, HostAdamW
from lmkit.optim.adamw import MASTER
from lmkit.recipe.load import load_recipe
from lmkit.training.plan import plan
from lmkit.training.resume import load_optimizer_tensors, optimizer_tensors

DTYPES = [torch.float32, torch.bfloat16]


def weights(dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((5, 3), (3,))]


def make_steps(optimizer, params, count):
    torch.manual_seed(1)
    for _ in range(count):
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.gradient_factor = torch.tensor(0.5)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_steps_are_adamws(dtype):
    results = []
    for kind in (AdamW, HostAdamW):
        params = weights(dtype)
        optimizer = kind(params, lr=0.1)
        optimizer.keep_masters({param: param.detach().float() for param in params})
        make_steps(optimizer, params, 5)
        results.append((params, [optimizer.state[param]["master"] for param in params]))
    (ours, our_masters), (theirs, their_masters) = results
    assert all(map(torch.equal, our_masters, their_masters))
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("kinds", [(HostAdamW, AdamW), (AdamW, HostAdamW), (HostAdamW, HostAdamW)])
def test_state_loads_both_ways(kinds):
    saver, loader = kinds
    params = weights()
    optimizer = saver(params, lr=0.1)
    make_steps(optimizer, params, 3)
    twins = [torch.nn.Parameter(param.detach().clone()) for param in params]
    loaded = loader(twins, lr=1.0)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    make_steps(optimizer, params, 3)
    make_steps(loaded, twins, 3)
    assert all(map(torch.equal, params, twins))


@pytest.mark.parametrize("masters", [False, True])
def test_fault_163_a_resumed_run_keeps_its_state_on_the_host(masters):
    """On "meta", which stands for a GPU."""
    layer = torch.nn.Linear(4, 3)
    optimizer = HostAdamW(layer.parameters())
    make_steps(optimizer, list(layer.parameters()), 2)
    saved = optimizer_tensors(optimizer, layer)
    resumed = torch.nn.Linear(4, 3, device="meta")
    loaded = HostAdamW(resumed.parameters())
    if masters:
        loaded.keep_masters({param: torch.empty(param.shape, device="cpu") for param in resumed.parameters()})
    load_optimizer_tensors(loaded, resumed, [saved], None, origin="saved")
    for param, twin in zip(layer.parameters(), resumed.parameters(), strict=True):
        state = loaded.state[twin]
        names = ["exp_avg", "exp_avg_sq", *([MASTER] if masters else [])]
        assert all(torch.equal(state[name], optimizer.state[param][name]) for name in names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_somebody_loaded_between_two_steps_are_those_that_move(dtype):
    param = torch.nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = HostAdamW([param], lr=1e-3, weight_decay=0.0)
    for start in (1.0, 5.0):
        with torch.no_grad():
            param.copy_(torch.full((4,), start))
        for _ in range(2):
            param.grad = torch.ones_like(param)
            optimizer.step()
        torch.testing.assert_close(optimizer.state[param]["master"], torch.full((4,), start - 2e-3))


def test_a_step_on_the_host_is_not_captured():
    assert hasattr(AdamW(weights()), "captured")
    assert not hasattr(HostAdamW(weights()), "captured")


def test_a_plan_counts_no_state_on_the_gpu():
    names = (f"optimizer.name={name}" for name in ("adamw_host", "adamw"))
    ours, theirs = (plan(load_recipe("llama_1b", [name]), CARDS["H200"]) for name in names)
    assert ours.memory.optimizer == 0
    assert theirs.memory.peak - ours.memory.peak == pytest.approx(theirs.memory.optimizer, rel=0.01)
