"""Checks of `DataParallel` and `ShardedOptimizer` inside a process group, run as those of rank_checks.py are."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from raising import raises
from rank_break_off_checks import explode
from rank_model import (
    FLOAT64_TOLERANCE,
    adamw,
    assert_close_models,
    assert_same_on_all_ranks,
    batch,
    check,
    gathered_when_waited_for,
    groups_of,
    joined_run,
    seeded_model,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from lmkit.errors import UsageError
from lmkit.optim.adamw import AdamW
from lmkit.parallel import DataParallel, Ranks, ShardedOptimizer


@check(
    strategy=("naive", "flat", "overlap", "bucketed", "torch_ddp"), explicit=(False, True), sharded=(False,)
)
@check(strategy=("bucketed", "torch_ddp"), explicit=(False,), sharded=(True,))
def check_data_parallel(ranks: Ranks, strategy: str, explicit: bool, sharded: bool) -> None:
    """As training on the joined batch, whoever averages the gradients; PyTorch's DDP is one of the strategies."""
    oracle = seeded_model(0, ranks)
    joined_run(oracle, ranks.world_size, [2] * 4)
    options: dict[str, Any] = {"bucket_mb": 0.0003}
    if strategy == "torch_ddp":
        options["find_unused_parameters"] = True
    model = DataParallel(seeded_model(ranks.rank, ranks), strategy, **options)  # rank 0's values must win
    assert_same_on_all_ranks(model, ranks)
    groups = groups_of(model)
    optimizer = adamw(groups)
    if sharded:
        optimizer = ShardedOptimizer(groups, torch.optim.AdamW, lr=0.02, betas=(0.9, 0.95), eps=1e-6)
    for step in range(4):
        for micro in range(2):
            with model.no_sync() if micro == 0 else nullcontext():
                (model(*batch(step, ranks.rank, micro), ranks.rank) / 2).backward()
        if explicit:
            model.finish_gradient_synchronization()
        assert model.module.never.grad is None
        optimizer.step()
        optimizer.zero_grad()
        assert not any(parameter.grad is not None for parameter in model.parameters())
    assert_close_models(model.module, oracle, FLOAT64_TOLERANCE)
    assert_same_on_all_ranks(model, ranks)


@check()
def check_data_parallel_averages_once(ranks: Ranks) -> None:
    """At the end of the pass, or by the call: never the pass of one step with the call of another."""
    model = DataParallel(nn.Linear(3, 1, bias=False).to(ranks.device, torch.float64), "overlap")
    weight, mean = model.module.weight, (ranks.world_size + 1) / 2
    for number in range(3):
        weight.grad = None
        (model(torch.ones(3, dtype=torch.float64, device=ranks.device)) * (ranks.rank + 1)).sum().backward()
        assert weight.grad.tolist() == [[mean] * 3]
        weight.grad.add_(ranks.rank)  # would be averaged, too
        if number:
            model.finish_gradient_synchronization()
        assert weight.grad.tolist() == [[mean + ranks.rank] * 3]
    weight.grad = torch.full_like(weight, ranks.rank + 1.0)  # no pass made it
    model.finish_gradient_synchronization()
    assert weight.grad.tolist() == [[mean] * 3]


@check()
def check_data_parallel_forgets_a_pass_that_raised_in_the_next_forward(ranks: Ranks) -> None:
    """No pass follows that would tell: the gradients that were under way must leave again, with new values."""
    layers = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(4)]).to(ranks.device)
    model = DataParallel(layers, "overlap")
    handle = layers[1].weight.register_hook(explode)
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(4, device=ranks.device)).sum().backward()
    handle.remove()
    model(torch.ones(4, device=ranks.device))
    for weight in model.parameters():
        weight.grad = torch.full_like(weight, ranks.rank + 1.0)
    model.finish_gradient_synchronization()
    mean = torch.full((4, 4), (ranks.world_size + 1) / 2, device=ranks.device)
    assert all(torch.equal(weight.grad, mean) for weight in model.parameters())


class Checkpointed(nn.Sequential):
    """Each layer's backward runs a pass inside the pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


@check()
def check_data_parallel_of_reentrant_checkpoints(ranks: Ranks) -> None:
    torch.manual_seed(0)
    oracle = Checkpointed(*[nn.Linear(4, 4, bias=False) for _ in range(3)]).to(ranks.device, torch.float64)
    model = DataParallel(copy.deepcopy(oracle), "naive")
    inputs = torch.randn(ranks.world_size, 2, 4, dtype=torch.float64).to(ranks.device)
    model(inputs[ranks.rank].requires_grad_()).square().sum().backward()
    for x in inputs:
        (oracle(x.detach().requires_grad_()).square().sum() / ranks.world_size).backward()
    for mine, right in zip(model.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, right.grad, rtol=0, atol=FLOAT64_TOLERANCE)


@check()
def check_data_parallel_refuses_what_it_cannot_do(ranks: Ranks) -> None:
    for code, arguments in (
        ("parallel.strategy_shards", {"strategy": "zero1"}),
        ("parallel.wrong_option", {"weights": "bf16"}),
        ("parallel.wrong_option", {"depth": 2}),
        ("registry.unknown_name", {"strategy": "bucketted"}),
    ):
        with raises(UsageError, code):
            DataParallel(nn.Linear(2, 2), **arguments)


@check(which=("PyTorch's AdamW", "our AdamW", "SGD"))
def check_sharded_optimizer(ranks: Ranks, which: str) -> None:
    """Tied, frozen, unused and tiny parameters; groups, one added later; a schedule: as the optimizer itself."""
    optimizer_class, options = {
        "PyTorch's AdamW": (torch.optim.AdamW, {"lr": 0.01, "betas": (0.9, 0.95)}),
        "our AdamW": (AdamW, {"lr": 0.01, "betas": (0.9, 0.95)}),
        "SGD": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    }[which]
    model, reference = seeded_model(0, ranks, torch.float32), seeded_model(0, ranks, torch.float32)
    optimizers = []
    for trained, make in ((model, ShardedOptimizer), (reference, None)):
        matrices, vectors = groups_of(trained)
        groups = [{**matrices, "params": [*matrices["params"], *trained.frozen.parameters()]}]
        optimizer = make(groups, optimizer_class, **options) if make else optimizer_class(groups, **options)
        optimizer.add_param_group({**vectors, "lr": 0.005})
        optimizers.append(optimizer)
    mine, theirs = optimizers
    assert [len(g["params"]) for g in mine.param_groups] == [len(g["params"]) for g in theirs.param_groups]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]
    generator = torch.Generator().manual_seed(7)
    for step in range(8):
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            if q.requires_grad and q is not reference.never:
                q.grad = torch.randn(q.shape, generator=generator).to(q)
                p.grad = q.grad.clone()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            with gathered_when_waited_for():
                optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if step == 3:  # another optimizer goes on from the state
            saved = mine.state_dict()
            copy = ShardedOptimizer([dict(g) for g in mine.param_groups], optimizer_class, **options)
            copy.load_state_dict(saved)
            schedules[0].optimizer = mine = optimizers[0] = copy
        # Element-wise arithmetic on the same numbers, in other vector lanes.
        assert_close_models(model, reference, 1e-6)
    assert_same_on_all_ranks(model, ranks)
    held = sum(value.numel() for state in mine.state.values() for value in state.values() if value.ndim)
    whole = sum(value.numel() for state in theirs.state.values() for value in state.values() if value.ndim)
    padding = 128 * 2 * len(mine.shard_layout["buckets"])
    assert held <= whole / ranks.world_size + padding


@check()
def check_sharded_optimizer_edges(ranks: Ranks) -> None:
    weight = nn.Parameter(torch.ones(5, device=ranks.device))
    optimizer = ShardedOptimizer([weight], torch.optim.SGD, lr=0.5)

    def closure() -> float:
        weight.grad = torch.ones_like(weight)
        return 3.0

    assert optimizer.step(closure) == 3.0
    assert weight.tolist() == [0.5] * 5
    optimizer.zero_grad()
    optimizer.step()  # without gradients
    assert weight.tolist() == [0.5] * 5
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [weight]})
    with pytest.raises(ValueError, match="LBFGS"):
        ShardedOptimizer([weight], torch.optim.LBFGS)
