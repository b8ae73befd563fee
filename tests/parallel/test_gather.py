"""When GPUs read one another's memory: the rule, by what CUDA and the other ranks say. (Reading: tests/gpu.)"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lmkit.parallel import fsdp, gather
from lmkit.parallel.collectives import Traffic
from lmkit.parallel.gather import PeerShardGather, can_share_memory
from lmkit.parallel.ranks import Ranks
from lmkit.recipe.tables import ParallelConfig

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
def test_gpus_of_a_host_that_reach_each_other_share(monkeypatch, tmp_path, theirs, reach, version, expected):
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
    monkeypatch.setattr(fsdp, "reads_peers", lambda *_: True)
    monkeypatch.setattr(fsdp, "link", lambda *_, reads_peers: None)
    model = nn.Sequential(nn.Linear(63, 64), nn.Linear(63, 32))
    monkeypatch.setattr(fsdp, "PEER_LAYER_BYTES", 64 * 48 * 2)  # of the two in bf16
    for weights, how in (("fp32", "collective"), ("bf16", "reads peers")):
        sync = fsdp.Fsdp(Ranks(world_size=2), ParallelConfig(strategy="fsdp", weights=weights))
        sync._model = model
        sync._link(num_layers=2)
        assert sync.gather == how


@pytest.fixture
def barriers(monkeypatch):
    """(shards in slots, the barriers that it makes)."""
    barriers: list[str] = []
    link = PeerShardGather(SimpleNamespace(ranks=Ranks(world_size=2), traffic=Traffic()))
    link._memory = SimpleNamespace(barrier=lambda: barriers.append("barrier"))
    link._slots = [[torch.zeros(16, dtype=torch.uint8) for _ in range(2)] for _ in range(2)]
    return link, barriers


def test_ranks_wait_for_one_another_between_a_gather_without_a_graph_and_a_graph(monkeypatch, barriers):
    """Its last piece, and the first in the graph, may lie in one slot."""
    link, made = barriers
    captured = iter((False, True, False))
    monkeypatch.setattr(gather, "is_captured", lambda device: next(captured))
    for expected in (2, 1, 2):  # one of each gather, and another
        made.clear()
        link.start(torch.zeros(8), torch.ones(4))
        link.end_step()
        link.end_step()
        assert len(made) == expected


def test_a_capture_that_fails_on_one_rank_moves_no_slot_of_later_gathers(monkeypatch, barriers):
    """It has launched nothing there, however many pieces the host has counted."""
    link, _ = barriers
    slots = []
    for captured in (False, True, False, False):
        monkeypatch.setattr(gather, "is_captured", lambda device, captured=captured: captured)
        link._slots[0][0].zero_()
        link.start(torch.zeros(8), torch.ones(4))
        slots.append(bool(link._slots[0][0].any()))
    assert slots == [True, True, False, True]
