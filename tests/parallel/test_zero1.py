"""`zero1` on one process: what waits for weights and gradients that are under way."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lmkit.core.buckets import PendingMean
from lmkit.parallel.collectives import average_bucket
from lmkit.parallel.data_parallel import AveragedBuckets, BucketedSync
from lmkit.parallel.gather import Links
from lmkit.parallel.ranks import Ranks
from lmkit.parallel.zero1 import KeptShards, Zero1, start_gather
from lmkit.recipe.tables import ParallelConfig

RANKS = Ranks(world_size=2)


class Backend:
    """Gathers and averages: weights become 9 when they are waited for, and `events` says what was waited for."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.allocate = torch.zeros
        self._flats: list[torch.Tensor] = []

    def refill(self, flats: list[torch.Tensor]) -> list[Backend]:
        self._flats = list(flats)
        return [self for _ in flats]

    def wait(self) -> None:
        self.events.append("weights arrived")
        for flat in self._flats:
            flat.fill_(9)

    def reduce_scatter(self, flat: torch.Tensor) -> PendingMean:
        self.events.append("gradients go")
        return PendingMean([SimpleNamespace(wait=lambda: self.events.append("gradients end"))], [flat[:128]])

    def all_reduce(self, tensors: list[torch.Tensor]) -> PendingMean:
        return self.reduce_scatter(tensors[0])


@pytest.fixture
def parts():
    """(weight, strategy, its one bucket, the backend), with the weight on its way."""
    dtype = torch.float32
    weight, backend = nn.Linear(4, 4, bias=False).weight, Backend()
    sync = Zero1(RANKS, ParallelConfig(strategy="zero1"))
    links = Links(RANKS, backend, backend)  # type: ignore[arg-type]
    sync._flats = [KeptShards([weight], {weight: "weight"}, links, weight_dtype=dtype, reduce_dtype=dtype)]
    start_gather(sync._flats)
    weight.grad = torch.ones(4, 4)
    return weight, sync, sync._flats[0], backend


def test_a_rank_sends_gradients_only_when_it_has_read_the_weights(parts):
    """Or another could step its shard while this one still reads it: no layer needs to have run."""
    _, _, bucket, backend = parts
    bucket.reduce()
    assert backend.events == ["weights arrived", "gradients go"]


@pytest.mark.parametrize("strategy", ["bucketed", "zero1"])
def test_after_a_capture_that_failed_nothing_waits_for_its_events(parts, strategy, monkeypatch):
    """CUDA refuses to: they were recorded in the capture. Here a backward pass was captured up to its reductions."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    ranks = Ranks(world_size=2, device=torch.device("cuda", 0))
    weight, sync, bucket, backend = parts
    if strategy == "zero1":
        bucket.reduce()
        start_gather([bucket])
        sync.ranks = ranks
    else:
        sync = BucketedSync(ranks, ParallelConfig())
        sync.buckets = AveragedBuckets([weight], 0, backend, "fp32")
        sync.buckets.pending = [average_bucket([weight], backend, torch.float32)]
    backend.events.clear()
    sync.reset()
    sync.reset()  # it has forgotten all
    assert backend.events == []
