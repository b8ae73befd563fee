"""The layout of shards, and how optimizer state moves between layouts."""

import json
from typing import Any

import pytest
import torch
from torch import nn

from lmkit.parallel.ranks import Ranks
from lmkit.parallel.shards import consolidate, shard_size_of
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


def states_of(layout: dict, whole: dict[str, torch.Tensor]) -> list[dict]:
    """The states of all ranks; a bucket may hold several parameters and padding."""
    states = []
    for rank in range(layout["world_size"]):
        cut = {}
        for index, bucket in enumerate(layout["buckets"]):
            flat = torch.cat([whole[name] for name in bucket["names"]])
            padded = nn.functional.pad(flat, (0, layout["world_size"] * bucket["shard_size"] - len(flat)))
            own = padded.split(bucket["shard_size"])[rank]
            cut[str(index)] = {"exp_avg": own, "step": torch.tensor(3.0)}
        states.append({"rank": rank, "layout": layout, "state": cut})
    return states


def layout_for(world_size: int, *buckets: dict[str, int]) -> dict:
    made = []
    for sizes in buckets:
        size = shard_size_of(sum(sizes.values()), world_size)
        made.append({"names": list(sizes), "sizes": list(sizes.values()), "shard_size": size})
    return {"world_size": world_size, "buckets": made}


def test_state_survives_any_change_of_ranks_and_buckets():
    whole = {"a": torch.randn(300), "b": torch.randn(5), "c": torch.randn(1)}
    for layout in (layout_for(4, {"a": 300, "b": 5}, {"c": 1}), layout_for(3, {"c": 1, "b": 5}, {"a": 300})):
        states = states_of(layout, whole)
        assert {len(state["state"]["0"]["exp_avg"]) for state in states} == {128}
        again = consolidate(states)
        assert all(torch.equal(again[name]["exp_avg"], value) for name, value in whole.items())
        assert {float(state["step"]) for state in again.values()} == {3.0}
        whole = {name: state["exp_avg"] for name, state in again.items()}


def test_states_that_do_not_belong_together_are_refused():
    states = states_of(layout_for(2, {"a": 300}), {"a": torch.randn(300)})
    with pytest.raises(ValueError, match=r"ranks 0 to 1 in order, got \[0\]"):
        consolidate(states[:1])
    with pytest.raises(ValueError, match=r"got \[1, 0\]"):
        consolidate(states[::-1])
    with pytest.raises(ValueError, match="different layouts"):
        consolidate([states[0], {**states[1], "layout": layout_for(2, {"a": 300}, {"b": 1})}])
