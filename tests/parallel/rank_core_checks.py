"""The readable buckets by themselves, without a strategy."""

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

from lmkit.core.buckets import GradientBuckets
from lmkit.parallel.ranks import Ranks


@check()
def check_the_core_averages_as_the_strategies(ranks: Ranks) -> None:
    """Tied, frozen, unused parameters, in orders that differ between ranks, and accumulation, without a strategy."""
    oracle, model = (seeded_model(0, ranks) for _ in range(2))
    joined_run(oracle, ranks.world_size, [2] * 4)
    buckets = GradientBuckets([p for p in model.parameters() if p.requires_grad], capacity=300)
    optimizer = adamw(groups_of(model))
    for step in range(4):
        for micro in range(2):
            buckets.is_paused = micro == 0
            (model.loss(*batch(step, ranks.rank, micro), ranks.rank) / 2).backward()
        buckets.finish()
        model.never.grad = None
        optimizer.step()
        optimizer.zero_grad()
    assert len(buckets.buckets) > 3
    assert_close_models(model, oracle, FLOAT64_TOLERANCE)
