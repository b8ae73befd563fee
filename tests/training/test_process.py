"""Seed, threads and determinism hold while a run lasts and are restored afterwards; rank 0 decides."""

import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch

from lmkit.parallel.ranks import Ranks
from lmkit.recipe.load import load_recipe
from lmkit.recipe.tables import RunConfig
from lmkit.training import process
from lmkit.training.process import numerics, ranks_of


def settings() -> tuple[int, bool, bool]:
    return (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    )


def test_the_recipe_decides_while_the_block_runs_also_if_it_fails():
    before, drawn = settings(), []

    def draw_and_fail() -> None:
        with numerics(RunConfig(seed=3, threads=2, deterministic=True), Ranks()):
            assert settings() == (2, True, False)
            drawn.append(torch.rand(4))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        draw_and_fail()
    assert settings() == before == (1, False, True)
    assert torch.equal(drawn[0], torch.rand(4, generator=torch.Generator().manual_seed(3)))
    torch.set_num_threads(2)
    with numerics(RunConfig(), Ranks()):  # the default changes nothing but the seed
        assert settings() == (2, False, True)


FAULTS = """
import resource
import torch
from lmkit.parallel.ranks import Ranks
from lmkit.recipe.tables import RunConfig
from lmkit.training.process import numerics

def faults_of_steps():
    def step():
        return [torch.zeros(1 << 20) for _ in range(8)]  # 32 MB, more than glibc keeps

    for _ in range(3):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(30):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

with numerics(RunConfig(threads=1), Ranks()):
    print(faults_of_steps())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
@pytest.mark.full
@pytest.mark.parametrize("wanted", [True, False])
def test_memory_that_steps_free_is_kept_unless_somebody_set_it(wanted, monkeypatch):
    for variable in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_"):
        monkeypatch.delenv(variable, raising=False)
        if not wanted:
            monkeypatch.setenv(variable, str(1 << 17))
    done = subprocess.run([sys.executable, "-c", FAULTS], stdout=subprocess.PIPE, text=True, check=True)
    # Thirty times 32 MB are 245,760 pages of 4 KB.
    assert (int(done.stdout) < 20_000) == wanted


@pytest.mark.parametrize(
    ("world_size", "threads", "device", "given", "expected"),
    [
        (1, 0, "cpu", None, 1),
        (2, 0, "cpu", None, 3),
        (8, 0, "cpu", None, 1),
        (2, 5, "cpu", None, 5),
        (2, 0, "cuda", None, 1),  # on GPUs ranks do not compete for CPUs
        (2, 0, "cpu", "1", 1),
    ],
)
def test_ranks_share_cpus_unless_threads_are_set(world_size, threads, device, given, expected, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr(process, "usable_cpus", lambda: 6)
    with numerics(RunConfig(threads=threads), Ranks(world_size=world_size, device=torch.device(device))):
        assert torch.get_num_threads() == expected
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("device", "given", "expected"), [("cpu", "", ""), ("cuda", "", ":4096:8"), ("cuda", ":16:8", ":16:8")]
)
def test_cublas_gets_a_fixed_workspace_unless_it_has_one(device, given, expected, monkeypatch):
    name = "CUBLAS_WORKSPACE_CONFIG"
    monkeypatch.setenv(name, given)  # so that what the block sets is undone
    if not given:
        monkeypatch.delenv(name)
    with numerics(RunConfig(deterministic=True), Ranks(device=torch.device(device))):
        assert os.environ.get(name, "") == expected


@pytest.mark.parametrize(
    ("recipe", "device", "expected"),
    [("quickstart", "cuda", True), ("quickstart", "cpu", False), ("bench_ddp", "cuda", False)],
)
def test_training_on_gpus_gets_expandable_segments(monkeypatch, recipe, device, expected):
    place = Ranks(world_size=2, device=torch.device(device))
    expanded: list[bool] = []
    monkeypatch.setattr(process, "process_group", lambda *_, **__: nullcontext(place))
    monkeypatch.setattr(process, "expand_segments", lambda: expanded.append(True))
    with ranks_of(load_recipe(recipe)) as ranks:
        assert ranks is place
    assert bool(expanded) == expected
