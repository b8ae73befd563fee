"""The checks of test_parallel.py, which run on every rank of one process group.

Most train a module beside one process that has the whole batch, and compare the weights."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from raising import raises
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lmkit.errors import UsageError
from lmkit.parallel import FSDP, Ranks, gather_full_parameters

CHECKS: dict[str, Callable[[Ranks], object]] = {}
RARE: dict[str, Callable[[Ranks], object]] = {}
WIDTH = 20  # a matrix of 400 elements lies on both ranks
TOLERANCE = 1e-12  # float64 sums in another order


def check(function: Callable[[Ranks], object]) -> Callable[[Ranks], object]:
    CHECKS[function.__name__] = function
    return function


def rare(function: Callable[[Ranks], object]) -> Callable[[Ranks], object]:
    RARE[function.__name__] = function
    return function


class Net(nn.Module):
    """Layers, a scalar of its own, and a method that computes."""

    config = "of the net"

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(WIDTH, 3)
        self.double()

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = torch.tanh(self.run(block, x))
        return x

    def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(x))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(x)).square().mean()


def plain_loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def inputs(ranks: Ranks, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ranks.world_size, 4, WIDTH, dtype=torch.float64, generator=generator)


def pair(make: Callable[[], nn.Module] = Net, **options: Any) -> tuple[FSDP, Any]:
    torch.manual_seed(0)
    oracle = make()
    return FSDP(copy.deepcopy(oracle), **options), oracle


def train(
    ranks: Ranks,
    model: Any,
    oracle: Any,
    loss: Callable[[Any, torch.Tensor], torch.Tensor] = plain_loss,
    *,
    right: Callable[[Any, torch.Tensor], torch.Tensor] = plain_loss,
    steps: int = 3,
) -> None:
    """Train `model` by `loss` of this rank's batch, and `oracle` by `right` of all batches."""
    optimizers = [torch.optim.SGD(either.parameters(), lr=0.3, momentum=0.5) for either in (model, oracle)]
    for step in range(steps):
        x = inputs(ranks, step)
        loss(model, x[ranks.rank]).backward()
        (sum(right(oracle, part) for part in x) / ranks.world_size).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def assert_equal(model: FSDP, oracle: nn.Module, tolerance: float = TOLERANCE) -> None:
    whole = gather_full_parameters(model)
    for name, value in oracle.named_parameters():
        torch.testing.assert_close(whole[name], value.detach(), rtol=0, atol=tolerance, msg=name)


def check_trains(
    ranks: Ranks, model: FSDP, oracle: Any, loss: Callable = plain_loss, right: Callable = plain_loss
) -> None:
    before = copy.deepcopy(oracle)
    train(ranks, model, oracle, loss, right=right)
    assert_equal(model, oracle)
    changed = [not torch.equal(p, q) for p, q in zip(before.parameters(), oracle.parameters(), strict=True)]
    assert all(changed)


# FSDP: what is called


@check
def the_wrapped_module_and_its_methods_are_called_as_the_wrapper(ranks: Ranks) -> None:
    for call in (
        lambda model, x: model.module(x).square().mean(),
        lambda model, x: model.loss(x),
        lambda model, x: model.head(model.hidden(x)).square().mean(),
    ):
        model, oracle = pair()
        assert model.config == "of the net"
        with pytest.raises(AttributeError, match="no_such"):
            model.no_such  # noqa: B018
        check_trains(ranks, model, oracle, call)


@check
def a_method_casts_its_inputs_as_the_module(ranks: Ranks) -> None:
    model = FSDP(Net().float(), torch.bfloat16)
    x = inputs(ranks, 0)[ranks.rank].float()
    with torch.no_grad():
        assert model.hidden(x).dtype == model(x).dtype == torch.bfloat16
        assert torch.equal(model.loss(x), model(x).square().mean())


@check
def gradients_may_be_set_to_none_between_the_forward_and_the_backward_pass(ranks: Ranks) -> None:
    model, oracle = pair()
    optimizers = [torch.optim.SGD(either.parameters(), lr=0.3) for either in (model, oracle)]
    for step in range(3):
        x = inputs(ranks, step)
        losses = plain_loss(model, x[ranks.rank]), sum(plain_loss(oracle, part) for part in x) / 2
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert_equal(model, oracle)


@check
def weights_read_outside_their_layers_calls_are_gathered(ranks: Ranks) -> None:
    class Reads(Net):
        def __init__(self) -> None:
            super().__init__()
            self.gains = nn.ParameterList(torch.ones(WIDTH) for _ in range(2)).double()
            self.table = nn.Linear(WIDTH, WIDTH).double()  # never called

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = F.linear(self.hidden(x) * self.gains[0] + self.gains[1], self.table.weight, self.table.bias)
            return F.linear(x, self.blocks[1].weight)  # called and read

    model, oracle = pair(Reads)
    with torch.no_grad():  # a first call may be an evaluation
        model(inputs(ranks, 0)[ranks.rank])
    oracle.head.requires_grad_(False)
    model.head.requires_grad_(False)
    with raises(UsageError, "parallel.unfrozen", "head.weight"):
        model(inputs(ranks, 0)[ranks.rank])
    for either in (model, oracle):
        either.head.requires_grad_(True)
    train(ranks, model, oracle)
    assert_equal(model, oracle)


@check
def outside_of_calls_a_weight_is_this_ranks_slice(ranks: Ranks) -> None:
    model, _ = pair()
    assert model.module.blocks[0].weight is dict(model.named_parameters())["blocks.0.weight"]
    assert "bias=True" in repr(model)
    model(inputs(ranks, 0)[ranks.rank]).sum().backward()
    assert model.module.blocks[0].weight.grad.shape == model.module.blocks[0].weight.shape


@check
def layers_are_named_by_class_or_module(ranks: Ranks) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Net()
            self.last = nn.Linear(3, 3).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.model(x))

    torch.manual_seed(0)
    oracle = Outer()
    for layers, count in ((lambda m: [], 2), (lambda m: [nn.Linear], 6), (lambda m: m.model.blocks, 6)):
        module = copy.deepcopy(oracle)
        model = FSDP(module, layers=layers(module))
        assert len(model._sync._flats) == count
        # Blocks are not gathered together: the widest flat tensor is a block.
        most = max(flat.size for flat in model._sync._flats)
        assert (most <= 512) == (count == 6)
        check_trains(ranks, model, copy.deepcopy(oracle))
    for wrong in ([nn.Conv1d], [nn.Linear(1, 1)], [oracle]):
        with raises(UsageError, "parallel.no_such_layer", "Outer"):
            FSDP(oracle, layers=wrong)


# FSDP: passes


class Recomputed(Net):
    def __init__(self, how: str = "each", *, reentrant: bool = True) -> None:
        super().__init__()
        self.how, self.reentrant = how, reentrant

    def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.how == "one" and block is not self.blocks[1]:
            return block(x)
        y = checkpoint(block, x, use_reentrant=self.reentrant)
        return checkpoint(block, y, use_reentrant=self.reentrant) if self.how == "twice" else y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "all":
            return checkpoint(super().forward, x.requires_grad_(), use_reentrant=self.reentrant)
        return super().forward(x)


@check
def checkpoints_give_all_gradients(ranks: Ranks) -> None:
    for how, reentrant in itertools.product(("each", "one", "twice", "all"), (True, False)):
        model, oracle = pair(lambda how=how, reentrant=reentrant: Recomputed(how, reentrant=reentrant))
        with torch.no_grad():
            model(inputs(ranks, 0)[ranks.rank])
        check_trains(ranks, model, oracle)


@check
def a_penalty_on_the_slices_adds_to_the_gradients(ranks: Ranks) -> None:
    def penalty(model: nn.Module) -> Any:
        return 0.1 * sum(p.pow(2).sum() for p in model.parameters())

    for accumulates, first in itertools.product((False, True), (False, True)):

        def loss(model: Any, x: torch.Tensor, accumulates: bool = accumulates, first: bool = first) -> Any:
            if accumulates:  # the first pass of two
                (plain_loss(model, x.detach() + 1) / 2).backward()
            if first:  # autograd begins with what was computed last
                added = penalty(model)
                return plain_loss(model, x) + added
            return plain_loss(model, x) + penalty(model)

        def right(model: Any, x: torch.Tensor, accumulates: bool = accumulates) -> Any:
            other = plain_loss(model, x.detach() + 1) / 2 if accumulates else 0
            return plain_loss(model, x) + other + penalty(model)

        check_trains(ranks, *pair(), loss, right)


@check
def gradients_replaced_between_passes_count_as_given(ranks: Ranks) -> None:
    """As in one process: what `grad` holds when a pass begins is what the pass adds to."""
    model, oracle = pair()
    x = inputs(ranks, 0)
    for _ in range(2):
        plain_loss(model, x[ranks.rank]).backward()
        (sum(plain_loss(oracle, part) for part in x) / ranks.world_size).backward()
        for either in (model, oracle):
            for parameter in either.parameters():
                parameter.grad = None if parameter.grad is None else parameter.grad / 2
    for either in (model, oracle):
        torch.optim.SGD(either.parameters(), lr=0.3).step()
    assert_equal(model, oracle)


@check
def second_derivatives_are_refused(ranks: Ranks) -> None:
    model, oracle = pair()
    x = inputs(ranks, 0)[ranks.rank].requires_grad_()
    with raises(UsageError, "parallel.double_backward"):
        torch.autograd.grad(plain_loss(model, x), x, create_graph=True)
    (gradient,) = torch.autograd.grad(plain_loss(model, x), x)
    (expected,) = torch.autograd.grad(plain_loss(oracle, x), x)
    torch.testing.assert_close(gradient, expected)
    check_trains(ranks, model, oracle)


@check
def the_gradient_scaler_skips_the_same_steps_everywhere(ranks: Ranks) -> None:
    """In the second step the head's gradient on one rank is not finite. The other rank holds the head."""

    def loss_of(model: Any, x: torch.Tensor, *, explodes: bool) -> torch.Tensor:
        nothing = model.head(torch.zeros(WIDTH, dtype=torch.float64)).sum()
        return plain_loss(model, x) + nothing * (torch.inf if explodes else 0)

    model, oracle = pair()
    optimizers = [torch.optim.SGD(either.parameters(), lr=0.3) for either in (model, oracle)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in optimizers]
    for step in range(4):
        x = inputs(ranks, step)
        of_ranks = [loss_of(oracle, part, explodes=(step, rank) == (1, 1)) for rank, part in enumerate(x)]
        mine = loss_of(model, x[ranks.rank], explodes=(step, ranks.rank) == (1, 1))
        for loss, optimizer, scaler in zip((mine, sum(of_ranks) / 2), optimizers, scalers, strict=True):
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert_equal(model, oracle)
