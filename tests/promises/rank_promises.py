"""The checks of test_parallel.py, which run on every rank of one process group.

Most train a module beside one process that has the whole batch, and compare the weights."""

import copy
import io
import itertools
import pickle
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from raising import raises
from rank_runner import run_checks
from torch import nn, optim
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lmkit.errors import UsageError
from lmkit.parallel import FSDP, DataParallel, Ranks, ShardedOptimizer, gather_full_parameters
from lmkit.parallel.place import read_place
from lmkit.training import load_checkpoint, save_checkpoint

Check = Callable[[Ranks], object]
CHECKS: dict[str, Check] = {}
RARE: dict[str, Check] = {}
WIDTH = 20  # a matrix of 400 elements lies on both ranks


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def rare(function: Check) -> Check:
    RARE[function.__name__] = function
    return function


class Net(nn.Module):
    """Layers, a parameter of its own, and methods that compute."""

    config = "of the net"

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor([1.5]))
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
        return self.run(self.head, self.hidden(x))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(x)).square().mean()


class Delegating(nn.Module):
    """A module whose methods are those of a module inside, as PEFT's models have them."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inside"), name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x)


def plain_loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def inputs(ranks: Ranks, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ranks.world_size, 4, WIDTH, dtype=torch.float64, generator=generator, device="cpu")
    return x.to(ranks.device)


def pair(make: Callable[[], nn.Module] = Net) -> tuple[Any, Any]:
    torch.manual_seed(0)
    oracle = make()
    return FSDP(copy.deepcopy(oracle)), oracle


def assert_equal(model: FSDP, oracle: nn.Module) -> None:
    whole = gather_full_parameters(model)
    for name, value in oracle.named_parameters():  # float64 sums in another order
        torch.testing.assert_close(whole[name], value.detach(), rtol=0, atol=1e-12, msg=name)


def train(ranks: Ranks, model: Any, oracle: Any, loss: Any = plain_loss, right: Any = plain_loss) -> None:
    """Train `model` by `loss` of this rank's batch, and `oracle` by `right` of all batches."""
    settings: dict[str, Any] = {"lr": 0.3, "momentum": 0.5, "foreach": False}  # DTensors beside tensors
    optimizers = [torch.optim.SGD(either.parameters(), **settings) for either in (model, oracle)]
    for step in range(3):
        x = inputs(ranks, step)
        losses = loss(model, x[ranks.rank]), sum(right(oracle, part) for part in x) / ranks.world_size
        for value, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()  # between the forward and the backward pass
            value.backward()
            optimizer.step()


def check_trains(ranks: Ranks, model: Any, oracle: Any, *losses: Any) -> None:
    before = [parameter.detach().clone() for parameter in oracle.parameters()]
    train(ranks, model, oracle, *losses)
    assert_equal(model, oracle)
    for parameter, old in zip(oracle.parameters(), before, strict=True):
        assert torch.equal(parameter, old) != parameter.requires_grad


# FSDP: what is called, and read


@check
def the_wrapped_module_and_its_methods_are_called_as_the_wrapper(ranks: Ranks) -> None:
    for loss in (
        plain_loss,
        lambda model, x: model.module(x).square().mean(),
        lambda model, x: model.loss(x),
        lambda model, x: model.head(model.hidden(x)).square().mean(),
    ):
        model, oracle = pair()
        assert model.config == "of the net"
        with pytest.raises(AttributeError, match="no_such"):
            model.no_such  # noqa: B018
        check_trains(ranks, model, oracle, loss)
        for parameter in model.parameters():  # also where this rank has no elements
            assert parameter.grad.shape == parameter.shape
            assert parameter.grad.dtype == parameter.dtype
    oracle = Delegating(Net())
    check_trains(ranks, FSDP(copy.deepcopy(oracle)), oracle, lambda model, x: model.loss(x))
    narrow = FSDP(Net().float(), torch.bfloat16)
    assert narrow.hidden(inputs(ranks)[0].float()).dtype == torch.bfloat16


class Reads(Net):
    """Weights are read without their layer's call: of a list, of a layer that is never called, of one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.ParameterList(torch.ones(WIDTH) for _ in range(2)).double()
        self.table = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.linear(self.hidden(x) * self.gains[0] + self.gains[1], self.table.weight, self.table.bias)
        return self.head(F.linear(x, self.blocks[1].weight))


@check
def weights_read_outside_their_layers_calls_are_gathered(ranks: Ranks) -> None:
    model, oracle = pair(Reads)
    with torch.no_grad():  # a first call may be an evaluation
        model(inputs(ranks)[ranks.rank])
    for freezes in (False, True, False):
        for either in (model, oracle):
            either.head.requires_grad_(not freezes)
        check_trains(ranks, model, oracle)
    first = model.module.blocks[0].weight  # outside of calls, the slice
    assert first is dict(model.named_parameters())["blocks.0.weight"]
    assert first.grad.shape == first.shape
    assert first.numel() < WIDTH * WIDTH
    assert "bias=True" in repr(model)


@check
def layers_are_named_by_class_or_module(ranks: Ranks) -> None:
    torch.manual_seed(0)
    oracle = nn.Sequential(Net(), nn.Linear(3, 3).double())
    layers = (lambda m: [], lambda m: nn.Linear, lambda m: m[0].blocks, lambda m: m[0].head)
    for choose, count in zip(layers, (2, 6, 6, 6), strict=True):
        module = copy.deepcopy(oracle)
        model = FSDP(module, layers=choose(module))
        assert len(model._sync._flats) == count  # each is gathered by itself
        check_trains(ranks, model, copy.deepcopy(oracle))
    for wrong in ([nn.Conv1d], nn.Linear(1, 1), [oracle]):
        with raises(UsageError, "parallel.no_such_layer", "Sequential"):
            FSDP(oracle, layers=wrong)


# FSDP: passes


class Recomputed(Net):
    def __init__(self, how: str, reentrant: bool) -> None:
        super().__init__()
        self.how, self.reentrant = how, reentrant

    def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.how == "one" and block is not self.blocks[1]:
            return block(x)
        y = checkpoint(block, x, use_reentrant=self.reentrant)
        twice = self.how == "twice" and block is not self.head
        return checkpoint(block, y, use_reentrant=self.reentrant) if twice else y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "nested":
            return checkpoint(super().forward, x.requires_grad_(), use_reentrant=self.reentrant)
        return super().forward(x)


@check
def checkpoints_give_all_gradients(ranks: Ranks) -> None:
    for how in itertools.product(("each", "one", "twice", "nested"), (True, False)):
        model, oracle = pair(lambda how=how: Recomputed(*how))
        averaged, twin = DataParallel(copy.deepcopy(oracle), "naive"), copy.deepcopy(oracle)
        finish, passes = model._sync.finish, []
        model._sync.finish = lambda passes=passes, finish=finish: (passes.append(1), finish())
        with torch.no_grad():
            model(inputs(ranks)[ranks.rank].requires_grad_())
        check_trains(ranks, model, oracle)
        assert len(passes) == 3  # a pass inside a pass does not count
        train(ranks, averaged, twin)
        for name, value in twin.named_parameters():
            torch.testing.assert_close(averaged.module.get_parameter(name), value, rtol=0, atol=1e-12)


def penalized(model: Any, x: torch.Tensor) -> torch.Tensor:
    """The penalties' backward passes come before and after the module's."""
    first, last = (0.1 * sum(p.pow(n).sum() for p in model.parameters()) for n in (2, 4))
    return first + plain_loss(model, x) + last


@check
def penalties_on_slices_and_gradients_between_passes_count(ranks: Ranks) -> None:
    """As in one process: what `grad` holds when a pass begins is what the pass adds to."""
    (model, oracle), x = pair(), inputs(ranks)
    for number in range(4):
        penalized(model, x[ranks.rank]).backward()
        (sum(penalized(oracle, part) for part in x) / ranks.world_size).backward()
        for parameter in (*model.parameters(), *oracle.parameters()):
            if number and parameter.grad is not None:
                parameter.grad = parameter.grad / 2
    for either in (model, oracle):
        torch.optim.SGD(either.parameters(), lr=0.3).step()
    assert_equal(model, oracle)


@check
def second_derivatives_are_refused(ranks: Ranks) -> None:
    model, oracle = pair()
    x = inputs(ranks)[ranks.rank].requires_grad_()
    with raises(UsageError, "parallel.double_backward"):
        torch.autograd.grad(plain_loss(model, x), x, create_graph=True)
    first = [torch.autograd.grad(plain_loss(either, x), x) for either in (model, oracle)]
    torch.testing.assert_close(*first)
    check_trains(ranks, model, oracle)


@check
def the_gradient_scaler_skips_the_same_steps_everywhere(ranks: Ranks) -> None:
    """In the second step the head's gradient on one rank is not finite. The other rank holds the head."""

    def loss(model: Any, step: int, rank: int) -> torch.Tensor:
        nothing = model.head(torch.zeros(WIDTH, dtype=torch.float64)).sum()
        return plain_loss(model, inputs(ranks, step)[rank]) + nothing * (
            torch.inf if step == rank == 1 else 0
        )

    model, oracle = pair()
    optimizers = [torch.optim.SGD(either.parameters(), lr=0.3) for either in (model, oracle)]
    scalers = [torch.amp.GradScaler(ranks.device.type, init_scale=8.0, growth_interval=2) for _ in optimizers]
    for step in range(4):
        joined = sum(loss(oracle, step, rank) for rank in range(ranks.world_size)) / ranks.world_size
        losses = loss(model, step, ranks.rank), joined
        for value, optimizer, scaler in zip(losses, optimizers, scalers, strict=True):
            scaler.scale(value).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale() == (8, 4, 4, 8)[step]
    assert_equal(model, oracle)


# FSDP: as a part of other modules, and state


@check
def an_optimizer_of_an_outer_modules_parameters_trains(ranks: Ranks) -> None:
    torch.manual_seed(0)
    oracle, outer, theirs = (nn.Sequential(Net(), nn.Linear(3, 3).double()) for _ in range(3))
    for other in (outer, theirs):
        other.load_state_dict(oracle.state_dict())
        for parameter in other[1].parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p: dist.all_reduce(p.grad.div_(ranks.world_size))
            )
    outer[0] = FSDP(outer[0])
    fully_shard(theirs[0])
    for model in (theirs, outer):
        train(ranks, model, copy.deepcopy(oracle) if model is theirs else oracle)
    saved = outer.state_dict()
    for name, value in theirs.state_dict().items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        torch.testing.assert_close(saved[name.replace("0.", "0.module.", 1)].cpu(), whole.cpu())
        torch.testing.assert_close(oracle.state_dict()[name], whole)


@rare
def an_optimizer_of_a_compiled_modules_parameters_trains(ranks: Ranks) -> None:
    for part in (lambda model: model, lambda model: model.module.blocks[0]):
        model, oracle = pair(Reads)
        part(model).compile(backend="aot_eager")
        check_trains(ranks, model, oracle)
    model, oracle = pair()
    train(ranks, torch.compile(model, backend="aot_eager"), oracle)
    assert_equal(model, oracle)


@check
def state_dicts_of_submodules_have_whole_weights(ranks: Ranks) -> None:
    model, oracle = pair()
    expected = oracle.state_dict()
    for prefix, module in (("", model.module), ("blocks.", model.blocks), ("blocks.1.", model.blocks[1])):
        saved = module.state_dict()
        assert saved.keys() == {name.removeprefix(prefix) for name in expected if name.startswith(prefix)}
        assert all(torch.equal(value, expected[prefix + name].cpu()) for name, value in saved.items())


@check
def assigned_state_dicts_are_copied(ranks: Ranks) -> None:
    (model, _), oracle = pair(), Net()
    loaded = copy.deepcopy(oracle.state_dict())
    model.module.load_state_dict(loaded, assign=True)
    check_trains(ranks, model, oracle)
    model.blocks[0].load_state_dict(oracle.blocks[1].state_dict(), assign=True)
    oracle.blocks[0].load_state_dict(oracle.blocks[1].state_dict())
    partly = {name: value + 1 for name, value in oracle.state_dict().items() if name.endswith("weight")}
    for either in (model.module, oracle):
        either.load_state_dict(partly, strict=False)  # the biases stay
    assert_equal(model, oracle)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.module.load_state_dict({})


@check
def checkpoints_have_whole_weights(ranks: Ranks) -> None:
    model, oracle = pair()
    optimizers = [torch.optim.AdamW(either.parameters()) for either in (model, oracle)]
    with pytest.raises(ValueError, match="shard"):
        save_checkpoint(model, optimizers[0], 3, io.BytesIO())
    oracle(inputs(ranks)).sum().backward()
    optimizers[1].step()
    sharded, whole = io.BytesIO(), io.BytesIO()
    save_checkpoint(model, None, 3, sharded)
    save_checkpoint(oracle, optimizers[1], 4, whole)
    with pytest.raises(ValueError, match="slices"):
        load_checkpoint(io.BytesIO(whole.getvalue()), model, optimizers[0])
    for file, step in ((whole, 4), (sharded, 3)):
        for into in (model, oracle):
            assert load_checkpoint(io.BytesIO(file.getvalue()), into) == step
        assert_equal(model, oracle)
    assert_equal(pair()[0], oracle)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    save_checkpoint(model, None, 3, f"{folder[0]}/c")  # every rank names the path, and one writes it
    dist.barrier()
    fresh = Net()
    assert load_checkpoint(f"{folder[0]}/c", fresh) == 3
    assert_equal(model, fresh)
    dist.barrier()
    if ranks.is_first:
        shutil.rmtree(folder[0])


@check
def copies_and_a_second_wrapper_are_refused(ranks: Ranks) -> None:
    model, _ = pair()
    for take in (
        *(copy.deepcopy, pickle.dumps, torch.optim.swa_utils.AveragedModel),
        *(lambda m: copy.deepcopy(m.module), lambda m: torch.save(m.module.blocks[0], io.BytesIO())),
    ):
        with raises(UsageError, "parallel.not_copied", hint="state_dict"):
            take(model)
    for wrap in (DataParallel, FSDP, lambda m: ShardedOptimizer(m.parameters(), torch.optim.SGD, lr=0.1)):
        with raises(UsageError, "parallel.sharded_twice", hint="layers"):
            wrap(nn.Sequential(model))


# All three


def set_weight(module: Any) -> None:
    module.head.weight = nn.Parameter(torch.zeros(3, WIDTH).double())


def set_layer(module: Any) -> None:
    module.head = nn.Linear(WIDTH, 3).double()


def load_head(module: Any) -> None:
    module.head.load_state_dict(Net().head.state_dict(), assign=True)


def set_data(module: Any) -> None:
    module.blocks[1].weight.data = module.blocks[1].weight.data.clone()


@check
def a_module_that_changes_after_wrapping_is_refused(ranks: Ranks) -> None:
    """Gradients of new parameters would stay on this rank, and parameters in other memory would not be trained."""
    changes = [(change, "replaced", "head.weight") for change in (set_weight, set_layer, load_head)]
    moves = [(change, "moved", "") for change in (nn.Module.float, set_data)]
    unfreezes = (lambda module: module.frozen.requires_grad_(True), "unfrozen", "")

    def optimized(module: Any) -> Any:
        optimizer = ShardedOptimizer(module.named_parameters(), torch.optim.SGD, lr=0.1)
        return lambda x: (module(x).sum().backward(), optimizer.step())[0]

    cases = ((DataParallel, changes), (FSDP, [*changes[:2], *moves]), (optimized, moves))
    for wrap, (change, code, named) in ((wrap, case) for wrap, some in cases for case in (unfreezes, *some)):
        module, x = Net(), inputs(ranks)[ranks.rank]
        module.frozen = nn.Linear(2, 2).requires_grad_(False)
        model = wrap(module)
        model(x)
        module.to(ranks.device)  # where it is
        module.blocks[0] = nn.Sequential(module.blocks[0])  # the same parameters
        model(x)
        with raises(UsageError, f"parallel.{code}", named):
            change(module)
            model(x.to(module.head.weight.dtype))


@check
def data_parallel_copies_and_pickles_as_pytorchs(ranks: Ranks) -> None:
    net = Net()
    made = DataParallel(net, "overlap", bucket_mb=0.001).eval(), DistributedDataParallel(copy.deepcopy(net))
    x = inputs(ranks)[ranks.rank]
    for take in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
        copies = [take(model) for model in made]
        assert not copies[0].training
        for model in copies:
            plain_loss(model, x).backward()
        for p, q in zip(*(model.parameters() for model in copies), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
    averaged = torch.optim.swa_utils.AveragedModel(made[0])
    averaged.update_parameters(made[0])
    assert torch.equal(averaged(x), made[0](x))


OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    *((optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": nesterov}) for nesterov in (False, True)),
    *((kind, {"lr": 0.05}) for kind in (optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam)),
    *(
        (kind, {"lr": 0.05})
        for kind in (optim.RMSprop, optim.Adagrad, optim.Adadelta, optim.ASGD, optim.Rprop)
    ),
]


@check
def sharded_optimizers_step_as_pytorchs_zero(ranks: Ranks) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of its own use of torch.jit

    for kind, settings in OPTIMIZERS:
        models = [nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 3)).double() for _ in range(3)]
        for parameter in models[0].parameters():
            dist.broadcast(parameter.data, src=0)
        plain, mine, theirs = (model.parameters() for model in models)
        for model in models[1:]:
            model.load_state_dict(models[0].state_dict())
        optimizers = [
            kind(plain, **settings),
            ShardedOptimizer(mine, kind, **settings),
            ZeroRedundancyOptimizer(theirs, kind, **settings),
        ]
        for step, (model, optimizer) in itertools.product(range(4), zip(models, optimizers, strict=True)):

            def closure(step: int = step, model: Any = model) -> float:
                model(inputs(ranks, step)[0]).square().sum().backward()
                return step + 0.5

            optimizer.zero_grad()
            optimizer.step()  # without gradients
            optimizer.param_groups[0]["lr"] = settings["lr"] / (step + 1)
            assert optimizer.step(closure) == step + 0.5
        for values in zip(*(model.parameters() for model in models), strict=True):
            for value in values[1:]:
                torch.testing.assert_close(value, values[0], rtol=0, atol=1e-12)


def on_gpus() -> dict[str, list[str]]:
    torch.set_default_device(f"cuda:{read_place().local_rank}")
    return run_checks(CHECKS, "cuda")
