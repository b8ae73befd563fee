"""Seed, threads and determinism hold in the block, and are as before behind it."""

from __future__ import annotations

import os

import pytest
import torch

from lmkit.parallel.ranks import Ranks
from lmkit.recipe.tables import RunConfig
from lmkit.training import process as numerics_module
from lmkit.training.process import numerics


def settings() -> tuple[int, bool, bool]:
    return (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    )


def test_the_recipe_decides_while_the_block_runs() -> None:
    before = settings()
    with numerics(RunConfig(seed=3, threads=2, deterministic=True), Ranks()):
        assert settings() == (2, True, False)
        drawn = torch.rand(4)
    assert settings() == before == (1, False, True)
    assert torch.equal(drawn, torch.rand(4, generator=torch.Generator().manual_seed(3)))


def test_the_default_changes_nothing_but_the_seed() -> None:
    torch.set_num_threads(2)
    with numerics(RunConfig(), Ranks()):
        assert settings() == (2, False, True)


def test_everything_is_put_back_after_an_error() -> None:
    before = settings()
    with (
        pytest.raises(ZeroDivisionError),
        numerics(RunConfig(threads=2, deterministic=True), Ranks()),
    ):
        raise ZeroDivisionError
    assert settings() == before


@pytest.mark.parametrize(
    ("world_size", "threads", "expected"),
    [(1, 0, 1), (2, 0, 3), (3, 0, 2), (8, 0, 1), (2, 5, 5)],
)
def test_ranks_share_the_cpus(
    world_size: int, threads: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(numerics_module, "usable_cpus", lambda: 6)
    with numerics(RunConfig(threads=threads), Ranks(world_size=world_size)):
        assert torch.get_num_threads() == expected
    assert torch.get_num_threads() == 1


def test_whoever_set_the_threads_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics_module, "usable_cpus", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with numerics(RunConfig(), Ranks(world_size=2, device=torch.device("cuda"))):
        assert torch.get_num_threads() == 1  # on GPUs the CPUs are not what ranks compete for
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with numerics(RunConfig(), Ranks(world_size=2)):
        assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("device", "given", "expected"),
    [("cpu", None, None), ("cuda", None, ":4096:8"), ("cuda", ":16:8", ":16:8")],
)
def test_cublas_gets_a_fixed_workspace_unless_it_has_one(
    device: str, given: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "CUBLAS_WORKSPACE_CONFIG"
    monkeypatch.setenv(name, "")  # so that what the block sets is undone
    if given is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, given)
    with numerics(RunConfig(deterministic=True), Ranks(device=torch.device(device))):
        assert os.environ.get(name) == expected
