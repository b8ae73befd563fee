"""`zero1` on one process: what waits for weights and gradients that are under way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lmkit.core.buckets import PendingMean
from lmkit.parallel.collectives import average_bucket
from lmkit.parallel.data_parallel import AveragedBuckets, BucketedSync, OverlapSync
from lmkit.parallel.ranks import Ranks
from lmkit.parallel.zero1 import KeptShards, LazyWeights, Zero1, start_gather
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


def under_way(layer: nn.Linear) -> tuple[KeptShards, Any]:
    """A bucket of the layer's weight, which is on its way, and its backend."""
    backend = Backend()
    bucket = KeptShards(
        [layer.weight],
        [{"weight": layer.weight.shape}],
        RANKS,
        weight_dtype=torch.float32,
        gathers=backend,  # type: ignore[arg-type]
        reductions=backend,  # type: ignore[arg-type]
        reduce_dtype=torch.float32,
    )
    start_gather([bucket], backend)  # type: ignore[arg-type]
    return bucket, backend


def averaged(parameters: list[nn.Parameter], backend: Backend, times: int) -> AveragedBuckets:
    """Buckets with so many reductions of the parameters in flight."""
    buckets = AveragedBuckets(parameters, 0, backend, "fp32")  # type: ignore[arg-type]
    buckets.pending = [average_bucket(parameters, backend, torch.float32) for _ in range(times)]  # type: ignore[arg-type]
    return buckets


@pytest.fixture
def parts():
    """(model, its one bucket, the backend), with weights on their way."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    return model, *under_way(model[0])


def test_a_rank_sends_gradients_only_when_it_has_read_the_weights(parts):
    """Or another could step its shard while this one still reads it: no layer needs to have run."""
    model, bucket, backend = parts
    model[0].weight.grad = torch.ones(4, 4)
    bucket.reduce()
    assert backend.events == ["weights arrived", "gradients go"]


def test_weights_that_are_on_their_way_do_not_overwrite_loaded_ones(parts):
    model, bucket, backend = parts
    LazyWeights(model, [bucket])
    model.load_state_dict({"0.weight": torch.full((4, 4), 3.0)})
    model(torch.ones(1, 4))
    assert backend.events == ["weights arrived"]
    assert torch.equal(model[0].weight, torch.full((4, 4), 3.0))


def test_gradients_that_are_not_wanted_are_waited_for(parts):
    """What a collective still writes to must not be handed out again."""
    model, bucket, backend = parts
    model[0].weight.grad = torch.ones(4, 4)
    bucket.reduce()
    bucket.drop_reduced()
    assert backend.events[1:] == ["gradients go", "gradients end"]
    bucket.wait_reduced()
    assert bucket.gradient is None

    replicated = OverlapSync(RANKS, ParallelConfig())
    model[0].weight.grad = torch.ones(4, 4)
    replicated.buckets = averaged([model[0].weight], backend, times=2)
    replicated.reset()
    assert backend.events[3:] == [*["gradients go"] * 2, *["gradients end"] * 2]
    assert replicated.buckets.pending == []


def test_a_layer_that_the_last_pass_did_not_call_is_waited_for_right_after_the_step(parts):
    """Something else reads its weights, and tells nobody; that an earlier pass called it says nothing."""
    model, bucket, backend = parts
    lazy = LazyWeights(model, [bucket])
    model(torch.ones(1, 4))
    backend.events.clear()
    start_gather([bucket], backend)
    lazy.after_step()
    assert backend.events == [], "the next call waits"
    lazy.after_step()
    assert backend.events == ["weights arrived"]


def test_without_gradients_all_weights_are_waited_for_at_once():
    """Generation may read any weight past its layer; in training a call waits for its own layer's."""
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(2)])
    buckets, backends = zip(*map(under_way, model), strict=True)
    LazyWeights(model, buckets)
    model[0](torch.ones(1, 4))
    assert [backend.events for backend in backends] == [["weights arrived"], []]
    with torch.no_grad():
        model[0](torch.ones(1, 4))
    assert [backend.events for backend in backends] == [["weights arrived"]] * 2


@pytest.mark.parametrize("strategy", [BucketedSync, Zero1])
def test_after_a_capture_that_failed_nothing_waits_for_its_events(strategy, monkeypatch):
    """CUDA refuses to: they were recorded in the capture. Here a backward pass was captured up to its reductions."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    ranks = Ranks(world_size=2, device=torch.device("cuda", 0))
    sync = strategy(ranks, ParallelConfig(strategy="bucketed"))
    layer = nn.Linear(4, 4, bias=False)
    layer.weight.grad = torch.ones(4, 4)
    bucket, backend = under_way(layer)
    if strategy is Zero1:
        bucket.reduce()
        start_gather([bucket], backend)
        sync._flats = [bucket]
    else:
        sync.buckets = averaged([layer.weight], backend, times=1)
    backend.events.clear()
    sync.reset()
    sync.reset()  # it has forgotten all
    assert backend.events == []
