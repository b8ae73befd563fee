"""Checks of backward passes that raise, of gradients left from before, and of passes without `no_sync`."""

import copy
import math
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from raising import raises
from rank_model import (
    FLOAT64_TOLERANCE,
    INSIDE,
    OURS,
    STRATEGIES,
    assert_close_models,
    batch,
    build,
    check,
    joined_run,
    kind_for,
    one_step,
    seeded_model,
    start,
)
from torch import nn

from lmkit.errors import LmkitError
from lmkit.parallel.ranks import Ranks
from lmkit.parallel.strategy import Strategy
from lmkit.recipe.tables import ParallelConfig


def explode(gradient: torch.Tensor) -> None:
    raise ZeroDivisionError


def breaks_off(x: torch.Tensor) -> torch.Tensor:
    """Return x; the backward pass raises when it gets here."""
    x = x.clone()
    x.register_hook(explode)
    return x


def four_vectors(strategy: str, ranks: Ranks) -> tuple[nn.ParameterList, Strategy]:
    """A model of four parameters, and the strategy with two of them in each bucket."""
    model = nn.ParameterList(torch.full((4,), value, dtype=torch.float64) for value in (2.0, 3.0, 5.0, 7.0))
    model.to(ranks.device)
    sync = build(strategy, ranks, ParallelConfig(bucket_mb=2 * model[0].nbytes / 2**20))
    sync.attach(model)
    return model, sync


@check(strategy=INSIDE)
def check_breaking_off_after_orders_that_differ(ranks: Ranks, strategy: str) -> None:
    """Ranks whose gradients came in different orders in the first step have the same buckets under way when a later
    pass, in one order, breaks off in the same place: or the next collectives would not pair up."""
    model, sync = four_vectors(strategy, ranks)
    optimizer = sync.build_optimizer(partial(torch.optim.SGD, lr=0.0), [{"params": list(model)}])

    def loss(order: Sequence[int], breaks_at: int | None = None) -> torch.Tensor:
        product = torch.ones(4, dtype=torch.float64, device=ranks.device)
        for number in order:
            product = product * model[number]
            if number == breaks_at:
                product = breaks_off(product)
        return product.sum()

    loss((0, 1, 2, 3) if ranks.rank == 0 else (0, 1, 3, 2)).backward()
    sync.finish()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(ZeroDivisionError):
        loss((0, 1, 2, 3), breaks_at=1).backward()
    sync.reset()
    optimizer.zero_grad()
    sync.wait_for_weights()
    loss((0, 1, 2, 3)).backward()
    sync.finish()
    expected = (4 * (105.0**2 + 70.0**2 + 42.0**2 + 30.0**2)) ** 0.5  # the products of the other three
    assert math.isclose(float(sync.clip_gradients(float("inf"))), expected, rel_tol=1e-12)


@check(strategy=(*OURS, "fsdp"), tidy=(True, False))
def check_exception_in_backward(ranks: Ranks, strategy: str, tidy: bool) -> None:
    """Half of the hooks have run when backward raises (on every rank); the next step is as if nothing was."""
    oracle, model = (seeded_model(0, ranks, kind=kind_for(strategy)) for _ in range(2))
    joined_run(oracle, ranks.world_size, [1, 1])
    sync, call, optimizer = start(strategy, model, ranks)
    for step in range(2):
        # Under fsdp tensors, not parameters, keep their hooks while weights come and go.
        handle = model.layers[1].down.register_forward_pre_hook(
            lambda _, args: args[0].register_hook(explode) and None
        )
        with pytest.raises(ZeroDivisionError):
            call.loss(*batch(step, 0), 0).backward()
        handle.remove()
        if tidy:
            sync.reset()
        optimizer.zero_grad(set_to_none=True)
        one_step(sync, call, optimizer, ranks, step)
    sync.wait_for_weights()
    assert_close_models(model, oracle, FLOAT64_TOLERANCE)


@check(strategy=STRATEGIES)
def check_passes_without_no_sync(ranks: Ranks, strategy: str) -> None:
    """Who forgets `no_sync` gets the sum of both passes, or an error before a gradient is lost; never less."""

    def two_passes(model: nn.Module, step: int, rank: int) -> None:
        for micro in range(2):
            torch.manual_seed(100 * step + 10 * rank + micro)
            x = torch.randn(4, 8, dtype=torch.float64).to(ranks.device)
            model(x).square().mean().backward()

    torch.manual_seed(0)
    layers = [nn.Linear(8, 8, bias=False) for _ in range(4)]
    oracle = nn.Sequential(*layers).to(ranks.device, torch.float64)
    model = copy.deepcopy(oracle)
    sync = build(strategy, ranks, ParallelConfig(bucket_mb=2 * 64 * 8 / 2**20))  # two matrices each
    call = sync.attach(model)
    make = partial(torch.optim.SGD, lr=0.05)
    optimizer = sync.build_optimizer(make, [{"params": list(model.parameters())}])
    plain = torch.optim.SGD(oracle.parameters(), lr=0.05 / ranks.world_size)
    for step in range(3):  # before and after the order is settled
        for rank in range(ranks.world_size):
            two_passes(oracle, step, rank)
        if strategy in INSIDE:
            with raises(LmkitError, "parallel.unfinished_backward"):
                two_passes(call, step, ranks.rank)
            with raises(LmkitError, "parallel.unfinished_backward"), sync.no_sync():
                pass
            sync.reset()
            optimizer.zero_grad()
            with sync.no_sync():
                two_passes(call, step, ranks.rank)
        else:
            two_passes(call, step, ranks.rank)
        sync.finish()
        for either in (optimizer, plain):
            either.step()
            either.zero_grad()
    sync.wait_for_weights()
    assert_close_models(model, oracle, FLOAT64_TOLERANCE)
