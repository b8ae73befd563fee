"""The strategies on two GPUs over NCCL: the same checks as on gloo ranks."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from lmkit.parallel.launch import spawn_ranks

CHECKS_FOLDER = str(Path(__file__).parents[1] / "parallel")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.fixture(scope="module")
def outcome() -> dict[str, list[str]]:
    """name of a check -> what failed, per rank."""
    sys.path.insert(0, CHECKS_FOLDER)  # spawned ranks inherit it
    try:
        checks = importlib.import_module("rank_checks")
        return spawn_ranks(2, checks.run_all, (list(checks.CHECKS), "cuda"))
    finally:
        sys.path.remove(CHECKS_FOLDER)


def test_all_checks_ran_and_passed(outcome):
    checks = importlib.import_module("rank_checks").CHECKS
    failed = {name: texts for name, texts in outcome.items() if any(texts)}
    assert not failed, "\n".join(f"{name}:\n{text}" for name, texts in failed.items() for text in texts)
    assert set(outcome) == set(checks)
