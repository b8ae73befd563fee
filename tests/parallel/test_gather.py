"""When GPUs read one another's memory: the rule, by what CUDA and the other ranks say. (Reading: tests/gpu.)"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lmkit.parallel import gather
from lmkit.parallel.collectives import Traffic
from lmkit.parallel.gather import PeerShardGather, can_share_memory, reads_peers
from lmkit.parallel.ranks import Ranks

ONE_HOST = ("host", "0,1", 1)


@pytest.mark.parametrize(
    ("theirs", "reach", "version", "expected"),
    [
        (ONE_HOST, True, "2.11.0+cu130", True),
        (("another host", "0,1", 1), True, "2.11.0", False),
        (("host", "1,0", 1), True, "2.11.0", False),  # other numbers
        (("host", None, 1), True, "2.11.0", False),
        (("host", "0,1", 0), True, "2.11.0", False),  # the same GPU
        (ONE_HOST, False, "2.11.0", False),
        (ONE_HOST, True, "2.10.1", False),
    ],
)
def test_gpus_of_one_host_that_reach_one_another_share(
    monkeypatch, tmp_path, theirs, reach, version, expected
):
    def all_gather_object(everyone: list, mine: tuple) -> None:
        everyone[:] = [mine, theirs]

    (tmp_path / "boot_id").write_text("host")
    monkeypatch.setattr(gather, "_BOOT_ID", tmp_path / "boot_id")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(gather.dist, "all_gather_object", all_gather_object)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: reach and one != other)
    monkeypatch.setattr(torch, "__version__", version)
    assert can_share_memory(Ranks(world_size=2, device=torch.device("cuda", 0))) is expected


def test_cpus_do_not():
    assert not can_share_memory(Ranks(world_size=2))


def test_layers_that_are_large_on_average_are_gathered_by_the_backend(monkeypatch):
    monkeypatch.setattr(gather, "can_share_memory", lambda ranks: True)
    model, ranks = nn.Sequential(nn.Linear(63, 64), nn.Linear(63, 32)), Ranks(world_size=2)
    assert reads_peers(model, ranks, "fp32")
    monkeypatch.setattr(gather, "PEER_LAYER_BYTES", 64 * 48 * 2)  # of the two in bf16
    assert not reads_peers(model, ranks, "fp32")
    assert reads_peers(model, ranks, "bf16")


def test_ranks_wait_for_one_another_between_a_gather_without_a_graph_and_a_graph(monkeypatch):
    """Its last piece, and the first in the graph, may lie in one slot."""
    barriers, captured = [], iter((False, True, False))
    monkeypatch.setattr(gather, "is_captured", lambda device: next(captured))
    link = PeerShardGather(None, Ranks(world_size=2), Traffic())
    link._memory = SimpleNamespace(barrier=lambda: barriers.append("barrier"))
    link._slots = [[torch.zeros(16, dtype=torch.uint8) for _ in range(2)] for _ in range(2)]
    whole, shard = torch.zeros(8), torch.ones(4)
    for expected in (2, 1, 2):  # one of each gather, and another
        barriers.clear()
        link.start(whole, shard)
        link.end_step()
        link.end_step()
        assert len(barriers) == expected
