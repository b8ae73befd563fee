"""Buckets that fill inside a backward pass: when they are launched, with what, and with how many hooks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lmkit.parallel.gradient_watch import GradientWatch


class Chain:
    """loss = product of four numbers; gradients become ready from the last parameter to the first."""

    def __init__(self) -> None:
        self.parameters = [nn.Parameter(torch.tensor(float(value))) for value in (2, 3, 5, 7)]
        a, b, c, d = self.parameters
        self.buckets = [[c, d], [a, b]]
        self.launches: list[tuple[int, list[float]]] = []
        self.abandoned = 0
        self.watch = GradientWatch(self.buckets, self._launch, self._abandon)

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
    chain.watch.paused = True
    chain.backward()
    assert chain.launches == []
    chain.watch.paused = False
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
