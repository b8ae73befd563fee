"""`FSDP`, `ShardedOptimizer`, `DataParallel` on two gloo ranks: as PyTorch's, or refused in one line."""

import pytest
import rank_promises
from rank_runner import read_outcome, run_checks

from lmkit.parallel.launch import spawn_ranks


@pytest.fixture(scope="module")
def outcome() -> dict[str, list[str]]:
    return spawn_ranks(2, run_checks, (rank_promises.CHECKS, "cpu", None, 20))


@pytest.mark.parametrize("name", rank_promises.CHECKS)
def test_promise(outcome, name):
    read_outcome(outcome, name)


@pytest.mark.full
@pytest.mark.parametrize("name", rank_promises.RARE)
def test_rare_promise(name):
    read_outcome(spawn_ranks(2, run_checks, ({name: rank_promises.RARE[name]},)), name)
