"""How parameters share buckets, and when buckets are launched inside a backward pass. No ranks needed."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from raising import raises
from rank_break_off_checks import breaks_off
from torch import nn
from torch.utils.checkpoint import checkpoint

from lmkit.errors import LmkitError
from lmkit.parallel import buckets as mechanism
from lmkit.parallel.buckets import BucketHooks, fill_buckets, plan_buckets


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]


def sizes_of(buckets: list[list[nn.Parameter]]) -> list[list[int]]:
    return [[parameter.numel() for parameter in bucket] for bucket in buckets]


@pytest.mark.parametrize(("capacity", "reduce_dtype"), [(4 * 30, "fp32"), (2 * 30, "bf16")])
def test_the_parameter_that_reaches_the_capacity_closes_its_bucket(capacity, reduce_dtype):
    given = parameters(10, 20, 30, 5, 100, 7)
    assert sizes_of(fill_buckets(given, capacity, reduce_dtype)) == [[10, 20], [30], [5, 100], [7]]


def test_dtypes_never_share_a_bucket():
    """And buckets are in the order in which they become complete."""
    wide, narrow = parameters(4, 4, 4), parameters(4, 4, dtype=torch.bfloat16)
    mixed = [wide[0], narrow[0], wide[1], narrow[1], wide[2]]
    found = [[next(i for i, p in enumerate(mixed) if p is q) for q in x] for x in fill_buckets(mixed, 4 * 8)]
    assert found == [[0, 2], [1, 3], [4]]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((50, 50, 50, 5, 5), [[50, 50, 50], [5, 5]]),
        ((50, 50, 50), [[50, 50], [50]]),  # the very last alone
        ((5, 5), [[5, 5]]),
        ((), []),
    ],
)
def test_the_last_bucket_is_small(monkeypatch, sizes, expected):
    monkeypatch.setattr(mechanism, "LAST_BUCKET_BYTES", 4 * 12)
    assert sizes_of(plan_buckets(parameters(*sizes), 4 * 1000)) == expected


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

    def step(self, order=(0, 1, 2, 3)) -> list[tuple[int, list[float]]]:
        self.backward(order)
        self.watch.launch_rest()
        return self.launches

    def hooks(self) -> int:
        return sum(len(p._post_accumulate_grad_hooks or ()) for p in self.parameters)

    def zero_grad(self) -> None:
        self.launches.clear()
        for parameter in self.parameters:
            parameter.grad = None


def settled_chain() -> Chain:
    chain = Chain()
    chain.step()
    chain.watch.watch_ends(list(chain.watch.order))
    chain.zero_grad()
    return chain


# d loss / d parameter is the product of the others.
FIRST, SECOND = (0, [42.0, 30.0]), (1, [105.0, 70.0])


@pytest.fixture
def chain():
    return Chain()


@pytest.fixture
def settled():
    return settled_chain()


def test_full_buckets_are_launched_inside_the_pass(chain, settled):
    for run, hooks in ((chain, 4), (settled, 3)):  # later on d, which comes first, and on the ends c and a
        run.backward()
        assert run.launches == [FIRST, SECOND]
        assert run.hooks() == hooks
    assert chain.watch.order == chain.parameters[::-1]


@pytest.mark.parametrize("order", [(3, 2, 1, 0), (2, 3, 0, 1), (1, 0, 3, 2), (0, 2, 1, 3)])
def test_another_order_launches_complete_buckets_in_turn(settled, order):
    for _ in range(2):
        settled.zero_grad()
        settled.backward(order)
        assert settled.watch.without_gradient() == []
        settled.watch.launch_rest()
        assert settled.launches == [FIRST, SECOND]


@pytest.mark.parametrize("left", [(0,), (1,), (2,), (3,), (0, 2), (0, 1, 2, 3)])
def test_gradients_from_before_are_added_to_before_a_launch(settled, left):
    """They are there from the start, which says nothing about this pass."""
    for index in left:
        settled.parameters[index].grad = torch.ones(())
    a, b, c, d = (value + (index in left) for index, value in enumerate((105.0, 70.0, 42.0, 30.0)))
    assert settled.step() == [(0, [c, d]), (1, [a, b])]


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
    with pytest.raises(ZeroDivisionError):
        (breaks_off(a * b) * c * d).backward()
    assert settled.launches == [FIRST]
    settled.zero_grad()
    settled.backward()
    assert settled.abandoned == 1
    assert settled.launches == [FIRST, SECOND]


@pytest.mark.parametrize("make", [Chain, settled_chain])
def test_a_pass_inside_the_pass_is_part_of_it(make):
    """A checkpoint of the reentrant kind runs one: nothing has broken off."""
    chain = make()
    a, b, c, d = chain.parameters
    one = torch.ones((), requires_grad=True)
    (checkpoint(lambda x: x * a * b * c, one, use_reentrant=True) * d).backward()
    assert (chain.launches, chain.abandoned) == ([FIRST, SECOND], 0)
    with raises(LmkitError, "parallel.unfinished_backward"):
        chain.backward()


def test_the_order_is_that_of_one_pass_however_many_there_were(chain):
    for order in [(0, 1, 2, 3)] * 3 + [(1, 0, 3, 2)]:
        chain.zero_grad()
        chain.step(order)
    a, b, c, d = chain.parameters
    assert chain.watch.order == [c, d, a, b]
    chain.watch.reset()
    assert chain.watch.order == []


def test_hooks_replace_one_another(settled):
    a, b, c, d = settled.parameters
    settled.watch.watch_ends([c, d, a, b])
    assert settled.hooks() == 3
    settled.watch.watch_all()
    assert settled.watch.watches_all
    assert settled.hooks() == 4
    settled.backward((1, 0, 3, 2))
    assert settled.launches == [FIRST, SECOND]
    settled.watch.close()
    single = BucketHooks([[d], [c], [b], [a]], print, print, lambda: False)
    single.watch_ends([d, c, b, a])  # d begins the pass and ends a bucket
    assert settled.hooks() == 4


def test_without_parameters_there_is_nothing_to_watch():
    _, watch = hooked([], print)
    watch.watch_ends([])
    watch.launch_rest()
    assert watch.without_gradient() == []


@pytest.mark.parametrize("make", [Chain, settled_chain])
def test_hooks_do_not_keep_it_alive(make):
    chain = make()
    parameters, forgotten = chain.parameters, weakref.ref(chain.watch)
    del chain
    gc.collect()
    assert forgotten() is None
    torch.stack(parameters).prod().backward()  # the hooks that are left call nothing
