"""When `zero1` waits for weights that are still being gathered; on one process, with a gather that tells."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lmkit.parallel.lazy_weights import LazyWeights
from lmkit.parallel.process_group import Ranks
from lmkit.parallel.sharded_bucket import ShardedBucket, start_gather
from lmkit.parallel.zero1_layout import BucketLayout, shard_size_of

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
    def reduce_scatter(self, flat: torch.Tensor) -> None:
        self.events.append("gradients go")


@pytest.fixture
def parts():
    """(model, its one bucket, the gather), with weights on their way."""
    model, gather = nn.Sequential(nn.Linear(4, 4, bias=False)), Gather()
    layout = BucketLayout(0, ("0.weight",), (16,), shard_size_of(16, RANKS.world_size))
    bucket = ShardedBucket(
        list(model.parameters()),
        layout,
        RANKS,
        gather,  # type: ignore[arg-type]
        gather,  # type: ignore[arg-type]
        weight_dtype=torch.float32,
        wire_dtype=torch.float32,
    )
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
