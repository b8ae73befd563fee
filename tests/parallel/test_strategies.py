"""Every strategy on real gloo ranks. The checks are in rank_checks.py; here their outcomes are read by name."""

import re

import pytest
import rank_checks
import rank_model
import torch
from raising import raises
from rank_runner import read_outcome
from torch import nn

from lmkit.errors import UsageError
from lmkit.parallel import DataParallel, ShardedOptimizer
from lmkit.parallel.launch import spawn_ranks
from lmkit.parallel.ranks import Ranks
from lmkit.parallel.strategy import Strategy, build_strategy
from lmkit.recipe.tables import ParallelConfig
from lmkit.registry import STRATEGIES

LATER = re.compile(  # on four ranks, in the full session
    "by the other gather: (?!joined|traffic|zero1 weights)|fsdp module: torch.float16|.*compiled"
    "|late gradients: (?!overlap, our_adamw, True|bucketed, adamw|zero1, adamw, True)|muon of shards.*, False"
    "|fsdp of blocks: (block|selective), |fsdp dtypes: (fp32|bf16, fp32)|peers wait for one another: zero1"
)
CHECKS = [name for name in rank_checks.CHECKS if not LATER.match(name)]
# Sums over more than two ranks depend on the order, shards cross more borders: what could differ there.
PREFIXES = (
    *("late gradients: bucketed", "late gradients: zero1", "traffic", "by the other gather"),
    *("zero1 single", "zero1 weights", "same bits in the first step"),
    *("data parallel: bucketed", "sharded optimizer", "fsdp memory", "fsdp draws", "fsdp hybrid"),
    *("fsdp of blocks: compiled", "fsdp module"),
)
FOUR_RANKS = [
    name
    for name in rank_checks.CHECKS
    if name.startswith(PREFIXES) or (name.startswith("joined batch") and ", 2, " in name) or LATER.match(name)
]


@pytest.fixture(scope="module")
def on_two_ranks() -> dict[str, list[str]]:
    return spawn_ranks(2, rank_checks.run_all, (CHECKS,))


@pytest.fixture(scope="module")
def on_four_ranks() -> dict[str, list[str]]:
    return spawn_ranks(4, rank_checks.run_all, (FOUR_RANKS,))


@pytest.mark.parametrize("name", CHECKS)
def test_two_ranks(on_two_ranks, name):
    read_outcome(on_two_ranks, name)


# torch_fsdp: every rank has to use every parameter.
@pytest.mark.parametrize(
    "strategy", [name for name in STRATEGIES.names if name not in ("none", "torch_fsdp")]
)
def test_fault_76_unused_frozen_and_shared_parameters_are_trained_as_by_torch_ddp(on_two_ranks, strategy):
    """The checks' model has all three; every strategy, torch_ddp among them, equals training on the joined batch."""
    names = [name for name in CHECKS if name.startswith(f"joined batch: {strategy},")]
    assert len(names) >= 2
    for name in names:
        read_outcome(on_two_ranks, name)


@pytest.mark.full
@pytest.mark.parametrize("name", FOUR_RANKS)
def test_four_ranks(on_four_ranks, name):
    read_outcome(on_four_ranks, name)


def test_every_strategy_works_alone():
    """With one rank every strategy is plain training: same weights, no communication."""
    oracle = rank_model.seeded_model(0, Ranks())
    rank_model.joined_run(oracle, 1, [2, 2], max_norm=0.5)
    for name in STRATEGIES.names:
        model = rank_model.seeded_model(0, Ranks())
        sync, call, optimizer = rank_model.start(name, model, Ranks())
        for step in range(2):
            rank_model.one_step(sync, call, optimizer, Ranks(), step, passes=2, max_norm=0.5)
        sync.wait_for_weights()
        assert sync.traffic.calls == 0
        rank_model.assert_close_models(model, oracle, rank_model.FLOAT64_TOLERANCE)


def test_without_a_process_group_the_modules_of_the_api_change_nothing():
    after = []
    for wrap, make in ((DataParallel, ShardedOptimizer), (lambda m: m, lambda p, c, **o: c(p, **o))):
        torch.manual_seed(0)
        model = wrap(nn.Linear(3, 2))
        optimizer = make(model.parameters(), torch.optim.AdamW, lr=0.1)
        for step in range(3):
            model(torch.full((3,), step + 1.0)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        after.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert Ranks.current() == Ranks()
    assert torch.allclose(*after, rtol=0, atol=1e-6)  # the same arithmetic in other vector lanes


@pytest.mark.parametrize(("theirs", "ours"), STRATEGIES.aliases.items())
def test_spellings_that_recipes_accept_are_found_too(theirs, ours):
    assert type(build_strategy(theirs, Ranks())) is type(build_strategy(ours, Ranks()))


def test_unknown_strategies_and_options_are_refused():
    with raises(UsageError, "registry.unknown_name", "bucketed"):
        build_strategy("bucketted", Ranks())
    for wrong in ({"bucket_mb": 0}, {"reduce_dtype": "fp8"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ParallelConfig(**wrong)
    for strategy, options, says in (
        *(("bucketed", {"depth": 2}, "bucketed"), ("torch_ddp", {"static_graph": 1}, "torch_ddp")),
        *(("fsdp", {"state_dtype": "fp8"}, "fp8"), ("fsdp", {"shard_ranks": 3}, "3")),
    ):
        with raises(UsageError, "parallel.wrong_option", says, *options):
            build_strategy(ParallelConfig(strategy=strategy, options=options), Ranks(world_size=4))


def test_a_strategy_that_does_not_reduce_is_refused_by_name():
    class Unfinished(Strategy): ...

    sync = Unfinished(Ranks(world_size=2), ParallelConfig(strategy="flat"))
    with raises(UsageError, "parallel.no_reduce", "Unfinished", "_reduce"):
        sync.finish()
