"""When GPUs read one another's memory: the rule, by what CUDA and the other ranks say. (Reading: tests/gpu.)"""

from __future__ import annotations

import pytest
import torch

from lmkit.parallel import gather
from lmkit.parallel.gather import can_share_memory
from lmkit.parallel.ranks import Ranks

RANKS = Ranks(world_size=2, device=torch.device("cuda", 0))


@pytest.fixture
def answer(monkeypatch, tmp_path):
    """A function: what `can_share_memory` says on rank 0 if rank 1 tells this about its place."""

    def ask(
        theirs: tuple = ("host", "0,1", 1), *, reach: bool = True, torch_version: str = "2.11.0+cu130"
    ) -> bool:
        def all_gather_object(everyone: list, mine: tuple) -> None:
            everyone[:] = [mine, theirs]

        boot = tmp_path / "boot_id"
        boot.write_text("host")
        monkeypatch.setattr(gather, "_BOOT_ID", boot)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        monkeypatch.setattr(gather.dist, "all_gather_object", all_gather_object)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: reach and one != other)
        monkeypatch.setattr(torch, "__version__", torch_version)
        return can_share_memory(RANKS)

    return ask


def test_gpus_of_one_host_that_reach_one_another_share(answer):
    assert answer()


@pytest.mark.parametrize(
    "theirs",
    [("another host", "0,1", 1), ("host", "1,0", 1), ("host", None, 1), ("host", "0,1", 0)],
    ids=["another host", "other numbers", "no list", "the same GPU"],
)
def test_others_do_not(answer, theirs):
    assert not answer(theirs)


def test_without_peer_access_they_do_not(answer):
    assert not answer(reach=False)


def test_an_older_torch_does_not(answer):
    assert not answer(torch_version="2.10.1")


def test_cpus_do_not():
    assert not can_share_memory(Ranks(world_size=2))
