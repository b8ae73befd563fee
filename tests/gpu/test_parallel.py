"""The strategies on two GPUs over NCCL: the same checks as on gloo ranks, and what only GPUs can show."""

from collections.abc import Iterable

import pytest
import rank_api_checks
import rank_checks
import rank_promises
import rank_shard_checks
import torch

from lmkit.parallel.launch import spawn_ranks

MIB = 2**20

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def assert_all_passed(outcome: dict[str, list[str]], checks: Iterable[str]) -> None:
    failed = {name: texts for name, texts in outcome.items() if any(texts)}
    assert not failed, "\n".join(f"{name}:\n{text}" for name, texts in failed.items() for text in texts)
    assert set(outcome) == set(checks)


def test_all_checks_ran_and_passed():
    outcome = spawn_ranks(2, rank_checks.run_all, (list(rank_checks.CHECKS), "cuda"))
    assert_all_passed(outcome, rank_checks.CHECKS)


def test_the_modules_of_the_api_keep_their_promises():
    assert_all_passed(spawn_ranks(2, rank_promises.on_gpus), rank_promises.CHECKS)


def test_the_modules_of_the_api_work_over_gloo_with_cuda_tensors():
    """Two ranks on one GPU, as in courses."""
    names = [name for name in rank_checks.CHECKS if name.startswith(("data parallel", "sharded optimizer"))]
    outcome = spawn_ranks(2, rank_checks.run_all, (names, "cuda:0", "gloo"))
    assert not [text for texts in outcome.values() for text in texts if text]
    assert len(outcome) == len(names) > 10


def test_memory_that_was_shared_comes_back():
    """Also where weights outlive the object that shared them."""
    assert spawn_ranks(2, rank_shard_checks.memory_that_peers_leave, (256 * MIB, 4)) < 256 * MIB


def test_memory_of_ended_collectives_is_let_go():
    assert spawn_ranks(2, rank_checks.memory_that_collectives_keep, (64 * MIB,)) == 0


def test_the_host_of_a_rank_may_be_thousands_of_launches_ahead(monkeypatch):
    """Some 1,000 by default, all held in the queue until the kernel before them ends."""
    monkeypatch.delenv("CUDA_SCALE_LAUNCH_QUEUES", raising=False)
    assert spawn_ranks(2, rank_checks.launches_ahead) > 2000


def test_fsdp_holds_a_share_and_its_first_step_takes_no_more_memory_than_the_third():
    peaks, held, shards, slots = spawn_ranks(2, rank_api_checks.memory_of_steps)
    # The first step makes the optimizer's state behind its peak, which is in the backward pass.
    assert peaks[0] <= 1.05 * peaks[2]
    # Weights and two moments; the rest is the table of positions, and what the allocators round up: slots to 20 MiB.
    assert 3 * shards <= held <= 1.05 * 3 * shards + max(slots, bool(slots) * 20 * MIB)
    # At most gradients' shards, and a few layers: the whole model would be two shards of each kind.
    assert peaks[2] < 6 * shards + slots
