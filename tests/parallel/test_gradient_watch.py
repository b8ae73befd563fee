"""Buckets that fill inside a backward pass: when they are launched, with what, and with how many hooks."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from rank_training import refused
from torch import nn
from torch.utils.checkpoint import checkpoint

from lmkit.parallel.buckets import BucketHooks
from lmkit.parallel.ranks import Ranks
from lmkit.parallel.zero1 import Zero1
from lmkit.recipe.tables import ParallelConfig


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


def test_closed_there_are_no_hooks(settled):
    settled.watch.close()
    assert settled.hooks() == 0


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


def test_nothing_of_a_paused_pass_is_in_the_order(chain):
    chain.paused = True
    chain.backward()
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


ALL = (0, 1, 2, 3)


def test_zero1_takes_hooks_out_after_the_first_step():
    run = Sharded()
    assert run.hooks() == 4
    run.step(ALL)
    assert run.hooks() == 3  # where the pass begins, and two ends


def test_zero1_hooks_are_where_the_recorded_pass_began_and_ended_its_buckets():
    run = Sharded()
    run.step((1, 0, 3, 2))  # gradients of 2 and 3, then of 0 and 1
    assert [bool(p._post_accumulate_grad_hooks) for p in run.mine] == [False, True, True, True]


def test_zero1_keeps_the_hooks_where_passes_are_accumulated():
    run = Sharded()
    run.step(ALL, ALL)
    assert run.hooks() == 4
    run.step(ALL)
    assert run.hooks() == 4


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


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("resets", [True, False])
def test_zero1_begins_anew_after_a_step_that_broke_off(steps_before, resets):
    run = Sharded()
    for _ in range(steps_before):
        run.step(ALL)

    def explode(gradient: torch.Tensor) -> None:
        raise ZeroDivisionError

    handle = run.mine[1].register_hook(explode)
    with pytest.raises(ZeroDivisionError):
        run._loss(run.mine, (0, 1, 2, 3)).backward()
    handle.remove()
    if resets:
        run.sync.reset()
    run.optimizer.zero_grad()
    run.step(ALL)
    run.step(ALL)
    assert run.hooks() == 3


@pytest.mark.parametrize("steps_before", [0, 1])
def test_zero1_refuses_to_lose_the_gradients_of_a_pass_without_no_sync(steps_before):
    run = Sharded()
    for _ in range(steps_before):
        run.step(ALL)
    run.backward(ALL)
    with refused("parallel.unfinished_backward"):
        run.backward(ALL)
    with refused("parallel.unfinished_backward"):
        run.sync.no_sync()
    run.sync.reset()
    for optimizer in (run.optimizer, run.oracle):
        optimizer.zero_grad()
    run.step(ALL)
    run.step(ALL, ALL)


def test_zero1_is_paused_until_the_outermost_no_sync_ends():
    run = Sharded()
    run.step(ALL)
    with run.sync.no_sync():
        with run.sync.no_sync():
            run.backward(ALL)
        run.backward(ALL)
        assert all(p.grad is not None for p in run.mine), "a launch would have taken them"
    run.step(ALL)
