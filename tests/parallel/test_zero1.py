"""`zero1` on one process: what waits for weights and gradients that are under way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

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


def under_way(model: nn.Module) -> tuple[Zero1, list[Any]]:
    """A strategy with a bucket for each weight of the model, on its way, and the backend of each."""
    backends = [Backend() for _ in model.parameters()]
    sync = Zero1(RANKS, ParallelConfig(strategy="zero1"))
    for weight, backend in zip(model.parameters(), backends, strict=True):
        links = Links(RANKS, backend, backend)  # type: ignore[arg-type]
        sync._flats.append(KeptShards([weight], {weight: "weight"}, links, torch.float32, torch.float32))
        start_gather(sync._flats[-1:])
    sync._wait_in(model)
    return sync, backends


@pytest.fixture
def parts():
    """(model, strategy, its one bucket, the backend), with weights on their way."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    sync, (backend,) = under_way(model)
    return model, sync, sync._flats[0], backend


def test_a_rank_sends_gradients_only_when_it_has_read_the_weights(parts):
    """Or another could step its shard while this one still reads it: no layer needs to have run."""
    model, _, bucket, backend = parts
    model[0].weight.grad = torch.ones(4, 4)
    bucket.reduce()
    assert backend.events == ["weights arrived", "gradients go"]


def test_weights_that_are_on_their_way_do_not_overwrite_loaded_ones(parts):
    model, _, _, backend = parts
    model.load_state_dict({"0.weight": torch.full((4, 4), 3.0)})
    model(torch.ones(1, 4))
    assert backend.events == ["weights arrived"]
    assert torch.equal(model[0].weight, torch.full((4, 4), 3.0))


def test_gradients_that_are_not_wanted_are_waited_for(parts):
    """What a collective still writes to must not be handed out again."""
    model, _, bucket, backend = parts
    model[0].weight.grad = torch.ones(4, 4)
    bucket.reduce()
    bucket.drop_reduced()
    assert backend.events[1:] == ["gradients go", "gradients end"]
    bucket.wait_reduced()
    assert bucket.gradient is None


def test_a_layer_that_the_last_pass_did_not_call_is_waited_for_right_after_the_step(parts):
    """Something else reads its weights, and tells nobody; that an earlier pass called it says nothing."""
    model, sync, bucket, backend = parts
    model(torch.ones(1, 4))
    backend.events.clear()
    start_gather([bucket])
    sync._after_step()
    assert backend.events == [], "the next call waits"
    sync._after_step()
    assert backend.events == ["weights arrived"]


def test_without_gradients_all_weights_are_waited_for_at_once():
    """Generation may read any weight past its layer; in training a call waits for its own layer's."""
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(2)])
    _, backends = under_way(model)
    model[0](torch.ones(1, 4))
    assert [backend.events for backend in backends] == [["weights arrived"], []]
    with torch.no_grad():
        model[0](torch.ones(1, 4))
    assert [backend.events for backend in backends] == [["weights arrived"]] * 2


@pytest.mark.parametrize("strategy", ["bucketed", "zero1"])
def test_after_a_capture_that_failed_nothing_waits_for_its_events(parts, strategy, monkeypatch):
    """CUDA refuses to: they were recorded in the capture. Here a backward pass was captured up to its reductions."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    ranks = Ranks(world_size=2, device=torch.device("cuda", 0))
    model, sync, bucket, backend = parts
    model[0].weight.grad = torch.ones(4, 4)
    if strategy == "zero1":
        bucket.reduce()
        start_gather([bucket])
        sync.ranks = ranks
    else:
        sync = BucketedSync(ranks, ParallelConfig())
        sync.buckets = AveragedBuckets([model[0].weight], 0, backend, "fp32")
        sync.buckets.pending = [average_bucket([model[0].weight], backend, torch.float32)]
    backend.events.clear()
    sync.reset()
    sync.reset()  # it has forgotten all
    assert backend.events == []
