"""When buckets are launched inside a backward pass. No ranks needed."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from raising import raises
from rank_model import breaks_off
from torch import nn
from torch.utils.checkpoint import checkpoint

from lmkit.errors import LmkitError
from lmkit.parallel.buckets import WatchedBuckets


class Given(WatchedBuckets):
    """Given buckets; `launched` is called with the index of each that is launched."""

    def __init__(self, buckets: list[list[nn.Parameter]], launched: Callable[[int], None]) -> None:
        super().__init__(parameter for bucket in buckets for parameter in bucket)
        self._use(buckets)
        self._start_over()
        self.launch = launched
        self.settle()
        self.watch()

    def plan(self, in_ready_order: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        return self.buckets


def test_a_launch_that_raises_is_not_repeated():
    """Its collective may have started, and the other ranks go on to the next."""
    launched: list[int] = []

    def launch(index: int) -> None:
        launched.append(index)
        if index == 0:
            raise ZeroDivisionError

    buckets = [[nn.Parameter(torch.zeros(1))] for _ in range(2)]
    hooks = Given(buckets, launch)
    with pytest.raises(ZeroDivisionError):
        buckets[0][0].sum().backward()
    hooks.launch_rest()
    assert launched == [0, 1]


def weak(method: Callable) -> Callable:
    reference = weakref.WeakMethod(method)
    return lambda *arguments: reference()(*arguments)


class Chain:
    """loss = product of four numbers; gradients become ready from the last parameter to the first."""

    def __init__(self) -> None:
        self.parameters = [nn.Parameter(torch.tensor(float(value))) for value in (2, 3, 5, 7)]
        a, b, c, d = self.parameters
        self.buckets = [[c, d], [a, b]]
        self.launches: list[tuple[int, list[float]]] = []
        self.abandoned = 0
        self.watch = Given(self.buckets, weak(self._launch))
        self.watch.abandon = weak(self._abandon)

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
    chain.backward()
    chain.watch.in_ready_order = list(chain.watch.order)
    chain.watch.watch_ends()
    chain.watch.launch_rest()
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
    assert list(chain.watch.order) == chain.parameters[::-1]


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


def test_all_hooks_come_back(settled):
    settled.watch.watch()
    assert settled.watch.watches_all
    assert settled.hooks() == 4
    settled.backward((1, 0, 3, 2))
    assert settled.launches == [FIRST, SECOND]


@pytest.mark.parametrize("make", [Chain, settled_chain])
def test_hooks_do_not_keep_it_alive(make):
    chain = make()
    parameters, forgotten = chain.parameters, weakref.ref(chain.watch)
    del chain
    gc.collect()
    assert forgotten() is None
    torch.stack(parameters).prod().backward()  # the hooks that are left call nothing
