"""What waits for weights that are still being gathered, and for gradients that are still being averaged; on one
process, with collectives that tell."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lmkit.parallel.buckets import ReducingBucket
from lmkit.parallel.collectives import PendingMean
from lmkit.parallel.overlap import OverlapSync
from lmkit.parallel.ranks import Ranks
from lmkit.parallel.shards import BucketLayout, ShardedBucket, shard_size_of, start_gather
from lmkit.parallel.zero1 import LazyWeights
from lmkit.recipe.tables import ParallelConfig

RANKS = Ranks(world_size=2)


class Gather:
    """Weights arrive when they are waited for: then all are 9, and `events` says so."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._flats: list[torch.Tensor] = []

    def allocate(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(num_elements, dtype=dtype, device=device)

    def start(self, flats: list[torch.Tensor]) -> list[Gather]:
        self._flats = list(flats)
        return [self for _ in flats]

    def wait(self) -> None:
        self.events.append("weights arrived")
        for flat in self._flats:
            flat.fill_(9)

    # Also what averages gradients.
    def reduce_scatter(self, flat: torch.Tensor) -> PendingMean:
        self.events.append("gradients go")
        return PendingMean(SimpleNamespace(wait=lambda: self.events.append("gradients end")), [flat[:128]])

    def all_reduce(self, tensors: list[torch.Tensor]) -> PendingMean:
        return self.reduce_scatter(tensors[0])


def bucket_of(layer: nn.Linear, gather: Gather) -> ShardedBucket:
    layout = BucketLayout(0, ("weight",), (16,), shard_size_of(16, RANKS.world_size))
    return ShardedBucket(
        [layer.weight],
        layout,
        RANKS,
        gather,  # type: ignore[arg-type]
        gather,  # type: ignore[arg-type]
        weight_dtype=torch.float32,
        reduce_dtype=torch.float32,
    )


@pytest.fixture
def parts():
    """(model, its one bucket, the gather), with weights on their way."""
    model, gather = nn.Sequential(nn.Linear(4, 4, bias=False)), Gather()
    bucket = bucket_of(model[0], gather)
    start_gather([bucket], gather)  # type: ignore[arg-type]
    return model, bucket, gather


def test_a_rank_sends_gradients_only_when_it_has_read_the_weights(parts):
    """Or another could step its shard while this one still reads it: no layer needs to have run."""
    model, bucket, gather = parts
    model[0].weight.grad = torch.ones(4, 4)
    bucket.reduce()
    assert gather.events == ["weights arrived", "gradients go"]


def test_weights_that_are_on_their_way_do_not_overwrite_loaded_ones(parts):
    model, bucket, gather = parts
    LazyWeights(model, [bucket])
    model.load_state_dict({"0.weight": torch.full((4, 4), 3.0)})
    model(torch.ones(1, 4))
    assert gather.events == ["weights arrived"]
    assert torch.equal(model[0].weight, torch.full((4, 4), 3.0))


def test_gradients_that_are_not_wanted_are_waited_for(parts):
    """What a collective still writes to must not be handed out again."""
    model, bucket, gather = parts
    model[0].weight.grad = torch.ones(4, 4)
    bucket.reduce()
    bucket.drop_reduced()
    assert gather.events[1:] == ["gradients go", "gradients end"]
    assert bucket.master.grad is None
    bucket.wait_reduced()
    assert bucket.master.grad is None

    replicated = OverlapSync(RANKS, ParallelConfig())
    model[0].weight.grad = torch.ones(4, 4)
    replicated._flying = [
        ReducingBucket([model[0].weight], gather, reduce_dtype=torch.float32)  # type: ignore[arg-type]
        for _ in range(2)
    ]
    replicated._forget()
    assert gather.events[3:] == [*["gradients go"] * 2, *["gradients end"] * 2]
    assert replicated._flying == []


def test_a_layer_that_the_last_pass_did_not_call_is_waited_for_right_after_the_step(parts):
    """Something else reads its weights, and tells nobody; that an earlier pass called it says nothing."""
    model, bucket, gather = parts
    lazy = LazyWeights(model, [bucket])
    model(torch.ones(1, 4))
    gather.events.clear()
    start_gather([bucket], gather)  # type: ignore[arg-type]
    lazy.after_step()
    assert gather.events == [], "the next call waits"
    nn.functional.linear(torch.ones(1, 4), model[0].weight)
    lazy.after_step()
    assert gather.events == ["weights arrived"]


def test_without_gradients_all_weights_are_waited_for_at_once():
    """Generation may read any weight past its layer; in training a call waits for its own layer's."""
    model, gathers = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(2)]), [Gather(), Gather()]
    buckets = [bucket_of(layer, gather) for layer, gather in zip(model, gathers, strict=True)]
    LazyWeights(model, buckets)
    for bucket, gather in zip(buckets, gathers, strict=True):
        start_gather([bucket], gather)  # type: ignore[arg-type]
    model[0](torch.ones(1, 4))
    assert [gather.events for gather in gathers] == [["weights arrived"], []]
    with torch.no_grad():
        model[0](torch.ones(1, 4))
    assert [gather.events for gather in gathers] == [["weights arrived"], ["weights arrived"]]
