"""When buckets are launched inside a backward pass. No ranks needed."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from raising import raises
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

    def backward(self) -> None:
        loss = torch.ones(())
        for parameter in self.parameters:
            loss = loss * parameter
        loss.backward()


def settled_chain() -> Chain:
    chain = Chain()
    chain.backward()
    chain.watch.in_ready_order = list(chain.watch.order)
    chain.watch.watch_ends()
    chain.watch.launch_rest()
    chain.launches.clear()
    for parameter in chain.parameters:
        parameter.grad = None
    return chain


# d loss / d parameter is the product of the others.
FIRST, SECOND = (0, [42.0, 30.0]), (1, [105.0, 70.0])


def test_full_buckets_are_launched_inside_the_pass():
    chain = Chain()
    for run, hooks in (
        (chain, 4),
        (settled_chain(), 3),
    ):  # later on d, which comes first, and on the ends c and a
        run.backward()
        assert run.launches == [FIRST, SECOND]
        assert sum(len(p._post_accumulate_grad_hooks or ()) for p in run.parameters) == hooks
    assert list(chain.watch.order) == chain.parameters[::-1]


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


@pytest.mark.parametrize("make", [Chain, settled_chain])
def test_hooks_do_not_keep_it_alive(make):
    chain = make()
    parameters, forgotten = chain.parameters, weakref.ref(chain.watch)
    del chain
    gc.collect()
    assert forgotten() is None
    torch.stack(parameters).prod().backward()  # the hooks that are left call nothing
