"""Second derivatives of functions that have none are refused, however they are asked for, and only if used."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lmkit.attention import flash_torch
from lmkit.model import RMSNorm, linear_cross_entropy

Scalar = Callable[[Tensor, Tensor], Tensor]


def loss(hidden: Tensor, weight: Tensor) -> Tensor:
    return linear_cross_entropy(hidden, weight, torch.arange(len(hidden)))


def norm(x: Tensor, weight: Tensor) -> Tensor:
    layer = RMSNorm(8)
    return torch.func.functional_call(layer, {"weight": weight[0]}, (x,)).sum()


def attention(q: Tensor, k: Tensor) -> Tensor:
    q, k = q[None, None], k[None, None]
    return flash_torch(q, k, k * 2, causal=True).sum()


SCALARS = {"linear_cross_entropy": loss, "RMSNorm": norm, "flash_torch": attention}


@pytest.fixture(params=SCALARS)
def scalar(request: pytest.FixtureRequest) -> Scalar:
    return SCALARS[request.param]


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(3, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)


def penalised(scalar: Scalar, inputs: tuple[Tensor, Tensor], of: int) -> Tensor:
    """With nothing behind the scalar: the gradient that comes in is the constant 1."""
    value = scalar(*inputs)
    (gradient,) = torch.autograd.grad(value, inputs[of], create_graph=True)
    assert gradient.requires_grad
    return value + gradient.square().sum()


@contextmanager
def refused(name: str = "") -> Iterator[None]:
    with pytest.raises(RuntimeError, match=f"{name}.*differentiable once"):
        yield


@pytest.mark.parametrize("recomputed", [False, True], ids=["", "under activation checkpointing"])
@pytest.mark.parametrize("of", [0, 1])
@pytest.mark.parametrize("name", SCALARS)
def test_a_gradient_penalty_is_refused(name, inputs, of, recomputed):
    scalar: Any = partial(checkpoint, SCALARS[name], use_reentrant=False) if recomputed else SCALARS[name]
    with refused(name):
        penalised(scalar, inputs, of).backward()
    for wanted in inputs:  # autograd runs only what lies between the penalty and these tensors
        with refused(name):
            torch.autograd.grad(penalised(scalar, inputs, of), wanted)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_a_graph_that_nobody_uses_changes_nothing(scalar, inputs):
    plain = torch.autograd.grad(scalar(*inputs), inputs)
    graph = torch.autograd.grad(scalar(*inputs), inputs, create_graph=True)
    scalar(*inputs).backward(create_graph=True)
    for one, other, tensor in zip(plain, graph, inputs, strict=True):
        assert not one.requires_grad
        assert torch.equal(one, other)
        assert tensor.grad is not None
        assert torch.equal(one, tensor.grad)
        assert torch.equal(other.mul_(2), one * 2)  # may be written to, as other gradients


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_needs_no_gradient_gets_none(scalar, inputs, frozen):
    inputs[frozen].requires_grad_(False)
    with refused():
        penalised(scalar, inputs, 1 - frozen).backward()
    assert inputs[frozen].grad is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(scalar, inputs, reentrant):
    plain = torch.autograd.grad(scalar(*inputs), inputs)
    checkpoint(scalar, *inputs, use_reentrant=reentrant).backward()
    assert all(torch.equal(one, x.grad) for one, x in zip(plain, inputs, strict=True))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo does so
@pytest.mark.parametrize("scalar", [loss, attention])  # a compiled RMSNorm is PyTorch's
def test_no_graph_break_under_torch_compile(scalar, inputs):
    compiled = torch.compile(scalar, fullgraph=True, backend="aot_eager")
    plain = torch.autograd.grad(scalar(*inputs), inputs)
    traced = torch.autograd.grad(compiled(*inputs), inputs)
    for one, other in zip(plain, traced, strict=True):
        torch.testing.assert_close(one, other)  # the compiled loss sums in another order


def test_the_result_may_be_written_to(inputs):
    expected = torch.autograd.grad(loss(*inputs) / 4, inputs)
    value = loss(*inputs)
    value /= 4
    assert all(torch.equal(*pair) for pair in zip(torch.autograd.grad(value, inputs), expected, strict=True))
    x, layer = inputs[0], RMSNorm(8)
    (expected,) = torch.autograd.grad((layer(x) * 2).square().sum(), x)
    assert torch.equal(*torch.autograd.grad(layer(x).mul_(2).square().sum(), x), expected)


class NothingComesBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


def test_no_gradient_from_behind_gives_none(scalar, inputs):
    NothingComesBack.apply(scalar(*inputs)).backward()
    if scalar is norm:  # without .sum(), which hands zeros on
        NothingComesBack.apply(RMSNorm(8)(inputs[0])).sum().backward()
    assert all(x.grad is None or not x.grad.any() for x in inputs)
