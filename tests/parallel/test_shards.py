"""The layout of shards, and the states of ranks that have it."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lmkit.parallel.ranks import Ranks
from lmkit.parallel.shards import FlatShards, consolidate, shard_size_of
from lmkit.parallel.zero1 import Zero1
from lmkit.recipe.tables import ParallelConfig


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("elements", [1, 127, 128, 513, 100_000])
def test_shards_are_equal_and_aligned(world_size, elements):
    size = shard_size_of(elements, world_size)
    assert size % 128 == 0
    assert elements <= size * world_size < elements + 128 * world_size


def zero1_of(*sizes: int, rank: int = 0) -> Any:
    """The optimizer of parameters of so many elements, which share a bucket of 100."""
    model = nn.ParameterList(torch.zeros(size) for size in sizes)
    sync = Zero1(Ranks(rank=rank), ParallelConfig(bucket_mb=4 * 100 / 2**20))
    sync.attach(model)
    return sync.build_optimizer(torch.optim.SGD, [{"params": list(model)}])


def test_zero1_gives_what_fills_a_bucket_one_of_its_own():
    """An embedding, which comes last: alone it is reduced where it lies."""
    flats = zero1_of(100, 10, 10, 10)._flats
    assert [[p.numel() for p in flat.parameters] for flat in flats] == [[10, 10, 10], [100]]


def test_a_rank_sends_gradients_only_when_it_has_read_the_weights(monkeypatch):
    """Or another could step its shard while this one still reads it: no layer needs to have run."""
    (bucket,), events = zero1_of(5)._flats, []
    bucket._arriving = SimpleNamespace(wait=lambda: events.append("weights arrived"))
    monkeypatch.setattr(FlatShards, "reduce", lambda self: events.append("gradients go"))
    bucket.reduce()
    assert events == ["weights arrived", "gradients go"]


def test_a_state_survives_json_and_that_of_another_layout_is_refused():
    layout = json.loads(json.dumps(zero1_of(5).state_dict()["layout"]))
    state = {"rank": 0, "layout": layout, "state": {}, "param_groups": [{}]}
    zero1_of(5).load_state_dict(state)
    for optimizer, saved in ((zero1_of(6), state), (zero1_of(5), {**state, "rank": 1})):
        with pytest.raises(ValueError, match="load_whole"):
            optimizer.load_state_dict(saved)
    for elements in (4, 6):
        with pytest.raises(ValueError, match=f"momentum has {elements} elements, the parameter 5"):
            zero1_of(5).load_whole({"0": {"momentum": torch.ones(elements)}})


BUCKET = {"names": ["a", "b"], "sizes": [300, 5], "shard_size": 256}


def states_of_two_ranks() -> list[dict[str, Any]]:
    layout = {"world_size": 2, "buckets": [BUCKET]}
    parts = torch.arange(512.0).split(256)  # the last of them are padding
    return [
        {"rank": rank, "layout": layout, "state": {"0": {"exp_avg": part, "step": torch.tensor(3.0)}}}
        for rank, part in enumerate(parts)
    ]


def test_states_of_a_bucket_become_those_of_its_parameters():
    whole = consolidate(states_of_two_ranks())
    assert torch.equal(whole["a"]["exp_avg"], torch.arange(300.0))
    assert torch.equal(whole["b"]["exp_avg"], torch.arange(300.0, 305.0))
    assert [state["step"] for state in whole.values()] == [3, 3]


def test_states_that_do_not_belong_together_are_refused():
    first, second = states_of_two_ranks()
    with pytest.raises(ValueError, match=r"ranks 0 to 1 in order, got \[0\]"):
        consolidate([first])
    with pytest.raises(ValueError, match=r"got \[1, 0\]"):
        consolidate([second, first])
    with pytest.raises(ValueError, match="different layouts"):
        consolidate([first, {**second, "layout": {"world_size": 2, "buckets": [BUCKET, BUCKET]}}])
