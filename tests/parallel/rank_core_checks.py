"""The readable step and buckets by themselves, without a strategy."""

from functools import partial

import torch
from rank_model import (
    FLOAT64_TOLERANCE,
    adamw,
    assert_close_models,
    batch,
    check,
    groups_of,
    joined_run,
    seeded_model,
)

from lmkit.core.step import Step, Sync
from lmkit.parallel.ranks import Ranks


@check()
def check_the_core_averages_as_the_strategies(ranks: Ranks) -> None:
    """Tied, frozen, unused parameters, in orders that differ between ranks, and accumulation, without a strategy."""
    oracle, model = (seeded_model(0, ranks) for _ in range(2))
    for twin in (oracle, model):
        twin.never.requires_grad_(False)  # the core's step would let weight decay move it
    norms = joined_run(oracle, ranks.world_size, [2] * 4, max_norm=0.7)
    sync = Sync(model.parameters(), capacity=300)
    step = Step(partial(model.loss, rank=ranks.rank), adamw(groups_of(model)), sync, max_norm=0.7)
    for number in range(4):
        inputs, targets = zip(*(batch(number, ranks.rank, micro) for micro in range(2)), strict=True)
        step(torch.stack(inputs), torch.stack(targets), lr=0.02)
    assert len(sync.buckets.buckets) > 3
    assert max(norms) > 0.7
    assert_close_models(model, oracle, FLOAT64_TOLERANCE)
