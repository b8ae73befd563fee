"""How parameters are dealt into buckets, and in which order buckets leave: no ranks needed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lmkit.parallel import buckets as mechanism
from lmkit.parallel.buckets import BucketHooks, fill_buckets, plan_buckets
from lmkit.parallel.ranks import Ranks
from lmkit.parallel.shards import BucketLayout, ShardLayout, consolidate, shard_size_of, take_shards
from lmkit.parallel.zero1 import Zero1
from lmkit.recipe.tables import ParallelConfig


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]


def sizes_of(buckets: list[list[nn.Parameter]]) -> list[list[int]]:
    return [[parameter.numel() for parameter in bucket] for bucket in buckets]


def test_the_parameter_that_reaches_the_capacity_closes_its_bucket():
    given = parameters(10, 20, 30, 5, 100, 7)
    assert sizes_of(fill_buckets(given, capacity=4 * 30)) == [[10, 20], [30], [5, 100], [7]]
    assert sizes_of(fill_buckets(given, capacity=2 * 30, reduce_dtype="bf16")) == [
        [10, 20],
        [30],
        [5, 100],
        [7],
    ]


def test_dtypes_never_share_a_bucket():
    wide, narrow = parameters(4, 4, 4), parameters(4, 4, dtype=torch.bfloat16)
    mixed = [wide[0], narrow[0], wide[1], narrow[1], wide[2]]
    buckets = fill_buckets(mixed, capacity=4 * 8)
    assert [{p.dtype for p in bucket} for bucket in buckets] == [
        {torch.float32},
        {torch.bfloat16},
        {torch.float32},
    ]
    # Launched in this order, so it must be the order in which they become complete.
    ends = [max(next(i for i, p in enumerate(mixed) if p is q) for q in bucket) for bucket in buckets]
    assert ends == sorted(ends)


def test_the_last_bucket_is_small(monkeypatch):
    monkeypatch.setattr(mechanism, "LAST_BUCKET_BYTES", 4 * 12)
    assert sizes_of(plan_buckets(parameters(50, 50, 50, 5, 5), 4 * 1000)) == [[50, 50, 50], [5, 5]]
    assert sizes_of(plan_buckets(parameters(50, 50, 50), 4 * 1000)) == [[50, 50], [50]], "the very last alone"
    assert sizes_of(plan_buckets(parameters(5, 5), 4 * 1000)) == [[5, 5]]


def test_zero1_gives_what_fills_a_bucket_one_of_its_own():
    """An embedding, which comes last: alone it is reduced where it lies."""
    model = nn.ParameterList(parameters(100, 10, 10, 10))
    sync = Zero1(Ranks(), ParallelConfig(bucket_mb=4 * 100 / 2**20))
    sync.attach(model)
    optimizer = sync.build_optimizer(torch.optim.SGD, [{"params": list(model)}])
    assert [bucket.sizes for bucket in optimizer.shard_layout.buckets] == [(10, 10, 10), (100,)]


def hooked(members: list[int], launch: Callable[[int], None]) -> tuple[list[list[nn.Parameter]], BucketHooks]:
    """Buckets with so many parameters each, and their hooks."""
    buckets = [parameters(*[1] * count) for count in members]
    return buckets, BucketHooks(buckets, launch, lambda: None, lambda: False)


@pytest.mark.parametrize(("order", "launched"), [((2, 1, 1, 0), [0, 1, 2]), ((1, 1, 2), []), ((0, 2), [0])])
def test_buckets_are_launched_in_order_however_they_become_ready(order, launched):
    seen: list[int] = []
    buckets, hooks = hooked([1, 2, 1], seen.append)
    remaining = [list(bucket) for bucket in buckets]
    loss = torch.zeros(())
    for index in reversed(order):  # the last addition's gradient is ready first
        loss = loss + remaining[index].pop().sum()
    loss.backward()
    assert seen == launched
    hooks.launch_rest()
    assert seen == [0, 1, 2]


def test_a_launch_that_raises_is_not_repeated():
    """Its collective may have started, and the other ranks go on to the next."""
    launched: list[int] = []

    def launch(index: int) -> None:
        launched.append(index)
        if index == 0:
            raise ZeroDivisionError

    ((first,), _), hooks = hooked([1, 1], launch)
    with pytest.raises(ZeroDivisionError):
        first.sum().backward()
    hooks.launch_rest()
    assert launched == [0, 1]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("elements", [1, 127, 128, 513, 100_000])
def test_shards_are_equal_and_aligned(world_size, elements):
    size = shard_size_of(elements, world_size)
    assert size % 128 == 0
    assert elements <= size * world_size < elements + 128 * world_size


def state_of(rank: int, layout: ShardLayout, whole: dict[str, torch.Tensor]) -> dict:
    per_parameter = {name: {"exp_avg": value, "step": torch.tensor(3.0)} for name, value in whole.items()}
    return {"rank": rank, "layout": layout.as_json(), "state": take_shards(per_parameter, layout, rank)}


def layout_for(world_size: int, buckets: list[dict[str, int]]) -> ShardLayout:
    return ShardLayout(
        world_size,
        tuple(
            BucketLayout(
                0, tuple(sizes), tuple(sizes.values()), shard_size_of(sum(sizes.values()), world_size)
            )
            for sizes in buckets
        ),
    )


def test_state_survives_any_change_of_ranks_and_buckets():
    whole = {"a": torch.randn(300), "b": torch.randn(5), "c": torch.randn(1)}
    four = layout_for(4, [{"a": 300, "b": 5}, {"c": 1}])
    states = [state_of(rank, four, whole) for rank in range(4)]
    assert [len(state["state"]["0"]["exp_avg"]) for state in states] == [128, 128, 128, 128]
    for name, value in whole.items():
        assert torch.equal(consolidate(states)[name]["exp_avg"], value)
        assert consolidate(states)[name]["step"] == 3.0
    three = layout_for(3, [{"c": 1, "b": 5}, {"a": 300}])
    moved = consolidate(states)
    again = [
        {"rank": rank, "layout": three.as_json(), "state": take_shards(moved, three, rank)}
        for rank in range(3)
    ]
    for name, value in whole.items():
        assert torch.equal(consolidate(again)[name]["exp_avg"], value)


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
        take_shards(consolidate(states), layout_for(2, [{"a": 300, "b": 1}]), 0)


def test_layouts_survive_json():
    import json

    layout = layout_for(2, [{"a": 300, "b": 5}, {"c": 1}])
    assert ShardLayout.from_json(json.loads(json.dumps(layout.as_json()))) == layout
