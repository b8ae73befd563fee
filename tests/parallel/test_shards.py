"""The layout of shards, and how optimizer state moves between layouts."""

import json

import pytest
import torch
from torch import nn

from lmkit.parallel.ranks import Ranks
from lmkit.parallel.shards import BucketLayout, ShardLayout, consolidate, cut_state, shard_size_of
from lmkit.parallel.zero1 import Zero1
from lmkit.recipe.tables import ParallelConfig


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("elements", [1, 127, 128, 513, 100_000])
def test_shards_are_equal_and_aligned(world_size, elements):
    size = shard_size_of(elements, world_size)
    assert size % 128 == 0
    assert elements <= size * world_size < elements + 128 * world_size


def test_zero1_gives_what_fills_a_bucket_one_of_its_own():
    """An embedding, which comes last: alone it is reduced where it lies."""
    model = nn.ParameterList(torch.zeros(size) for size in (100, 10, 10, 10))
    sync = Zero1(Ranks(), ParallelConfig(bucket_mb=4 * 100 / 2**20))
    sync.attach(model)
    optimizer = sync.build_optimizer(torch.optim.SGD, [{"params": list(model)}])
    assert [bucket.sizes for bucket in optimizer.shard_layout.buckets] == [(10, 10, 10), (100,)]


def state_of(rank: int, layout: ShardLayout, whole: dict[str, torch.Tensor]) -> dict:
    per_parameter = {name: {"exp_avg": value, "step": torch.tensor(3.0)} for name, value in whole.items()}
    cut = {
        str(index): cut_state(
            per_parameter, bucket.names, slice(rank * bucket.shard_size, (rank + 1) * bucket.shard_size)
        )
        for index, bucket in enumerate(layout.buckets)
    }
    return {"rank": rank, "layout": layout.as_json(), "state": cut}


def layout_for(world_size: int, buckets: list[dict[str, int]]) -> ShardLayout:
    def bucket(sizes: dict[str, int]) -> BucketLayout:
        total = sum(sizes.values())
        return BucketLayout(0, tuple(sizes), tuple(sizes.values()), shard_size_of(total, world_size))

    return ShardLayout(world_size, tuple(map(bucket, buckets)))


def test_state_survives_any_change_of_ranks_and_buckets():
    whole = {"a": torch.randn(300), "b": torch.randn(5), "c": torch.randn(1)}
    layouts = [layout_for(4, [{"a": 300, "b": 5}, {"c": 1}]), layout_for(3, [{"c": 1, "b": 5}, {"a": 300}])]
    for layout in layouts:
        states = [state_of(rank, layout, whole) for rank in range(layout.world_size)]
        assert {len(state["state"]["0"]["exp_avg"]) for state in states} == {128}
        again = consolidate(states)
        assert all(torch.equal(again[name]["exp_avg"], value) for name, value in whole.items())
        assert {float(state["step"]) for state in again.values()} == {3.0}
        whole = {name: state["exp_avg"] for name, state in again.items()}


def test_states_that_do_not_belong_together_are_refused():
    whole = {"a": torch.randn(300)}
    two, other = layout_for(2, [{"a": 300}]), layout_for(2, [{"a": 300}, {"b": 1}])
    states = [state_of(rank, two, whole) for rank in range(2)]
    with pytest.raises(ValueError, match=r"ranks 0 to 1 in order, got \[0\]"):
        consolidate(states[:1])
    with pytest.raises(ValueError, match=r"got \[1, 0\]"):
        consolidate(states[::-1])
    with pytest.raises(ValueError, match="different layouts"):
        consolidate([states[0], {**states[1], "layout": other.as_json()}])
    with pytest.raises(ValueError, match="no optimizer state for b"):
        cut_state(consolidate(states), ("a", "b"), slice(0, 256))


def test_layouts_survive_json():
    layout = layout_for(2, [{"a": 300, "b": 5}, {"c": 1}])
    assert ShardLayout.from_json(json.loads(json.dumps(layout.as_json()))) == layout


def test_the_state_of_another_rank_or_layout_is_refused():
    layout, other = layout_for(2, [{"a": 5}]), layout_for(2, [{"a": 6}])
    layout.require_own({"rank": 1, "layout": layout.as_json()}, 1)
    for rank, saved_as in ((0, layout), (1, other)):
        with pytest.raises(ValueError, match="load_resharded"):
            layout.require_own({"rank": rank, "layout": saved_as.as_json()}, 1)
