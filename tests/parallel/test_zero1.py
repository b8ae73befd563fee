"""`zero1` on one process: its hooks whatever the passes, and waiting for weights and gradients under way."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lmkit.parallel.buckets import ReducingBucket
from lmkit.parallel.collectives import PendingMean
from lmkit.parallel.overlap import OverlapSync
from lmkit.parallel.ranks import Ranks
from lmkit.parallel.shards import BucketLayout, ShardedBucket, shard_size_of, start_gather
from lmkit.parallel.zero1 import LazyWeights, Zero1
from lmkit.recipe.tables import ParallelConfig

RANKS = Ranks(world_size=2)
ALL = (0, 1, 2, 3)


class Sharded:
    """`zero1` of a single rank beside plain SGD, from the same start."""

    def __init__(self) -> None:
        def make(groups: list[dict]) -> torch.optim.Optimizer:
            return torch.optim.SGD(groups, lr=0.25)

        def parameters() -> nn.ParameterList:
            return nn.ParameterList([torch.tensor(value) for value in (2.0, 3.0, 5.0, 7.0)])

        self.mine, self.theirs = parameters(), parameters()
        self.sync = Zero1(Ranks(), ParallelConfig(bucket_mb=2 * 4 / 2**20))  # two to a bucket
        self.sync.attach(self.mine)
        self.optimizer = self.sync.build_optimizer(make, [{"params": list(self.mine)}])
        self.oracle = make([{"params": list(self.theirs)}])

    def hooks(self) -> int:
        return sum(len(p._post_accumulate_grad_hooks or ()) for p in self.mine)

    def backward(self, order: tuple[int, ...], *, last: bool = True) -> None:
        with nullcontext() if last else self.sync.no_sync():
            self._loss(self.mine, order).backward()
        self._loss(self.theirs, order).backward()

    def step(self, *passes: tuple[int, ...]) -> None:
        for number, order in enumerate(passes):
            self.backward(order, last=number == len(passes) - 1)
        self.sync.finish()
        for optimizer in (self.optimizer, self.oracle):
            optimizer.step()
            optimizer.zero_grad()
        # One addition and one product per element, here and there.
        assert [p.item() for p in self.mine] == [p.item() for p in self.theirs]

    @staticmethod
    def _loss(parameters: nn.ParameterList, order: tuple[int, ...]) -> torch.Tensor:
        loss = torch.ones(())
        for index in order:
            loss = loss + torch.sin(parameters[index] * loss)
        return loss


@pytest.mark.parametrize(
    "steps",
    [
        [(ALL,), (ALL,), (ALL, ALL), (ALL,), (ALL, ALL, ALL)],
        [((0, 1, 3),), (ALL,), (ALL, (2, 1)), (ALL,)],
        [(ALL,), ((0, 1, 3),), ((2, 3),), ((1, 0),), (ALL,)],
        [(ALL,), ((3, 2, 1, 0),), ((0, 2, 1, 3, 0),), (ALL,)],
        [((1, 0, 1),), ((3, 1),), (ALL, ALL), ((3, 0, 1),)],
    ],
    ids=["accumulates later", "unused at first", "unused later", "another order", "never all"],
)
def test_zero1_equals_plain_steps_whatever_the_passes(steps):
    run = Sharded()
    for passes in steps:
        run.step(*passes)


def test_zero1_is_paused_until_the_outermost_no_sync_ends():
    run = Sharded()
    run.step(ALL)
    with run.sync.no_sync():
        with run.sync.no_sync():
            run.backward(ALL)
        run.backward(ALL)
        assert all(p.grad is not None for p in run.mine), "a launch would have taken them"
    run.step(ALL)


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
        return PendingMean([SimpleNamespace(wait=lambda: self.events.append("gradients end"))], [flat[:128]])

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
