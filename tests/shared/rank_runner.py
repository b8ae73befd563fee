"""Runs checks on every rank of one process group."""

import gc
import traceback
from collections.abc import Callable, Mapping

import pytest
import torch

from lmkit.parallel.ranks import Ranks, process_group


def run_checks(
    checks: Mapping[str, Callable[[Ranks], object]],
    device: str = "cpu",
    backend: str | None = None,
    timeout_s: float = 120,
) -> dict[str, list[str]]:
    """Run checks by name; name -> what failed, per rank ("" where nothing did)."""
    torch.set_num_threads(1)
    gc.freeze()  # what was imported: collecting it again costs each check a tenth of a second
    outcome: dict[str, list[str]] = {}
    with process_group(device, backend=backend, timeout_s=timeout_s) as ranks:
        for name, check in checks.items():
            try:
                check(ranks)
                mine = ""
            except (Exception, pytest.fail.Exception):  # noqa: BLE001 (whatever fails is the outcome)
                mine = traceback.format_exc()
            # By the store: after a failure the ranks' collectives may be out of step.
            ranks.store.set(f"{name}/{ranks.rank}", mine)
            outcome[name] = [ranks.store.get(f"{name}/{rank}").decode() for rank in range(ranks.world_size)]
            if any(outcome[name]):
                break
    return outcome


def read_outcome(outcome: dict[str, list[str]], name: str) -> None:
    if name not in outcome:
        pytest.skip("an earlier check failed, and the ranks stopped there")
    failures = [f"rank {rank}:\n{text}" for rank, text in enumerate(outcome[name]) if text]
    assert not failures, "\n".join(failures)
