"""How parameters share buckets, and when buckets are launched inside a backward pass. No ranks needed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from rank_model import refused
from torch import nn
from torch.utils.checkpoint import checkpoint

from lmkit.parallel import buckets as mechanism
from lmkit.parallel.buckets import BucketHooks, fill_buckets, plan_buckets


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


class Chain:
    """loss = product of four numbers; gradients become ready from the last parameter to the first."""

    def __init__(self) -> None:
        self.parameters = [nn.Parameter(torch.tensor(float(value))) for value in (2, 3, 5, 7)]
        a, b, c, d = self.parameters
        self.buckets = [[c, d], [a, b]]
        self.launches: list[tuple[int, list[float]]] = []
        self.abandoned = 0
        self.paused = False
        self.watch = BucketHooks(self.buckets, self._launch, self._abandon, lambda: self.paused)

    def _launch(self, index: int) -> None:
        self.launches.append((index, [float(parameter.grad) for parameter in self.buckets[index]]))

    def _abandon(self) -> None:
        self.abandoned += 1

    def backward(self, order=(0, 1, 2, 3)) -> None:
        loss = torch.ones(())
        for index in order:
            loss = loss * self.parameters[index]
        loss.backward()

    def hooks(self) -> int:
        return sum(len(p._post_accumulate_grad_hooks or ()) for p in self.parameters)

    def zero_grad(self) -> None:
        self.launches.clear()
        for parameter in self.parameters:
            parameter.grad = None


# d loss / d parameter is the product of the others.
FIRST, SECOND = (0, [42.0, 30.0]), (1, [105.0, 70.0])


@pytest.fixture
def chain():
    return Chain()


@pytest.fixture
def settled(chain):
    return settle(chain)


def settle(chain: Chain) -> Chain:
    chain.backward()
    chain.watch.launch_rest()
    chain.watch.watch_ends(list(chain.watch.order))
    chain.zero_grad()
    return chain


def test_a_full_bucket_is_launched_inside_the_pass(chain):
    chain.backward()
    assert chain.launches == [FIRST, SECOND]
    assert chain.watch.order == chain.parameters[::-1]
    assert chain.hooks() == 4


def test_ends_need_a_hook_each_and_one_for_the_beginning(settled):
    assert settled.hooks() == 3  # on d, which comes first, on c and on a
    settled.backward()
    assert settled.launches == [FIRST, SECOND]


@pytest.mark.parametrize("order", [(3, 2, 1, 0), (2, 3, 0, 1), (1, 0, 3, 2), (0, 2, 1, 3)])
def test_another_order_launches_complete_buckets_in_turn(settled, order):
    for _ in range(2):
        settled.zero_grad()
        settled.backward(order)
        assert settled.watch.without_gradient() == []
        settled.watch.launch_rest()
        assert settled.launches == [FIRST, SECOND]


def test_a_pass_that_adds_to_gradients_launches_sums(settled):
    """Every gradient is there from the start; that it is says nothing about this pass."""
    for parameter in settled.parameters:
        parameter.grad = torch.ones(())
    settled.backward()
    settled.watch.launch_rest()
    assert settled.launches == [(0, [43.0, 31.0]), (1, [106.0, 71.0])]


def test_gradients_from_before_of_some_parameters_are_added_to_before_a_launch(settled):
    a, _, c, _ = settled.parameters
    a.grad, c.grad = torch.ones(()), torch.ones(())
    settled.backward()
    settled.watch.launch_rest()
    assert settled.launches == [(0, [43.0, 30.0]), (1, [106.0, 70.0])]


def test_a_parameter_without_gradient_holds_its_bucket_and_all_after_it(settled):
    _, _, c, _ = settled.parameters
    settled.backward((0, 1, 3))
    assert settled.launches == []
    assert settled.watch.without_gradient() == [c]
    c.grad = torch.zeros(())
    settled.watch.launch_rest()
    assert settled.launches == [(0, [0.0, 6.0]), (1, [21.0, 14.0])]


def test_paused_nothing_is_launched(chain):
    chain.paused = True
    chain.backward()
    assert chain.launches == []
    chain.paused = False
    chain.backward()
    assert chain.launches == [(0, [84.0, 60.0]), (1, [210.0, 140.0])]


def test_a_pass_that_broke_off_is_abandoned_by_the_next(settled):
    a, b, c, d = settled.parameters

    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("broke off")

    with pytest.raises(RuntimeError, match="broke off"):
        (Breaks.apply(a * b) * c * d).backward()
    assert settled.launches == [FIRST]
    settled.zero_grad()
    settled.backward()
    assert settled.abandoned == 1
    assert settled.launches == [FIRST, SECOND]


@pytest.mark.parametrize("make", [Chain, lambda: settle(Chain())], ids=["all watched", "ends watched"])
def test_a_pass_inside_the_pass_is_part_of_it(make):
    """A checkpoint of the reentrant kind runs one: nothing has broken off."""
    chain = make()
    a, b, c, d = chain.parameters
    one = torch.ones((), requires_grad=True)
    (checkpoint(lambda x: x * a * b * c, one, use_reentrant=True) * d).backward()
    assert (chain.launches, chain.abandoned) == ([FIRST, SECOND], 0)
    with refused("parallel.unfinished_backward"):
        chain.backward()


def test_the_order_is_that_of_one_pass_however_many_there_were(chain):
    for order in [(0, 1, 2, 3)] * 3 + [(1, 0, 3, 2)]:
        chain.zero_grad()
        chain.backward(order)
        chain.watch.launch_rest()
    a, b, c, d = chain.parameters
    assert chain.watch.order == [c, d, a, b]
    chain.watch.reset()
    assert chain.watch.order == []


def test_watching_all_again_leaves_one_hook_each(settled):
    settled.watch.watch_all()
    assert settled.watch.watches_all
    assert settled.hooks() == 4
    settled.backward((1, 0, 3, 2))
    assert settled.launches == [FIRST, SECOND]


def test_what_begins_and_ends_a_bucket_has_one_hook(chain):
    _, _, c, d = chain.parameters
    chain.watch.watch_ends([c, d, *chain.parameters[:2]])
    assert chain.hooks() == 3
    chain.watch.watch_ends([d, c, *chain.parameters[:2]])
    assert chain.hooks() == 3
    chain.buckets[:] = [[parameter] for parameter in chain.parameters[::-1]]
    single = BucketHooks(chain.buckets, chain._launch, chain._abandon, lambda: False)
    chain.watch.close()
    single.watch_ends(chain.parameters[::-1])
    assert chain.hooks() == 4


def test_without_parameters_there_is_nothing_to_watch():
    watch = BucketHooks([], lambda index: None, lambda: None, lambda: False)
    watch.watch_ends([])
    watch.launch_rest()
    assert watch.without_gradient() == []


@pytest.mark.parametrize("make", [Chain, lambda: settle(Chain())])
def test_hooks_do_not_keep_it_alive(make):
    chain = make()
    parameters, forgotten = chain.parameters, weakref.ref(chain.watch)
    del chain
    gc.collect()
    assert forgotten() is None
    torch.stack(parameters).prod().backward()  # the hooks that are left call nothing
