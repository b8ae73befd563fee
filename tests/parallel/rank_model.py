"""What the checks on several ranks share: a small model with everything that makes synchronising gradients hard, the
run that is its oracle, a training under any strategy, and the list of checks."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lmkit.optim.adamw import AdamW
from lmkit.parallel.collectives import Averager
from lmkit.parallel.ranks import Ranks
from lmkit.parallel.strategy import Strategy, build_strategy
from lmkit.recipe.tables import ParallelConfig

VOCABULARY, WIDTH = 13, 6
INFINITY = float("inf")
SMALL_BUCKETS = ParallelConfig(bucket_mb=0.0003)  # about 300 bytes: several buckets even in this model
INSIDE = ("overlap", "bucketed", "zero1")  # communicate inside the backward pass
OURS = ("naive", "flat", *INSIDE)
STRATEGIES = (*OURS, "torch_ddp")

# The same sums in another order, in float64: rounding of 1e-16 that Adam's division and clipping amplify.
FLOAT64_TOLERANCE = 1e-10


class Layer(nn.Module):
    """`up` and `gate` are multiplied as one matrix: their gradients are slices of one tensor."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        joint = nn.functional.linear(self.norm(x), torch.cat((self.up.weight, self.gate.weight)))
        up, gate = joint.chunk(2, dim=-1)
        return x + self.down(torch.tanh(up + self.up.bias) * gate)


class HardModel(nn.Module):
    """Tied head, frozen layer, a scalar, a parameter of three elements, one that is never used, one that only
    some ranks use, and layers whose order differs between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(WIDTH, 5 + i) for i in range(3))
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.randn(3))
        self.never = nn.Parameter(torch.randn(4, 2))
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    is_orderly = False

    def loss(self, ids: torch.Tensor, targets: torch.Tensor, rank: int) -> torch.Tensor:
        ids, targets = ids.to(self.scale.device), targets.to(self.scale.device)
        x = self.embedding(ids)  # (rows, width)
        for layer in self.layers if self.is_orderly or rank % 2 == 0 else reversed(self.layers):
            x = layer(x)
        x = self.frozen(x)
        x = torch.cat([x[:, :3] + self.shift, x[:, 3:]], dim=1) * self.scale
        if self.is_orderly or rank == 1:
            used_by_rank_1 = self.sometimes(x)
            x = x + used_by_rank_1 if rank == 1 else x
        return nn.functional.cross_entropy(self.head(x), targets)

    forward = loss


class OrderlyModel(HardModel):
    """The same, but all ranks call the same layers in the same order, though not all use the results."""

    is_orderly = True


class EasyModel(nn.Module):
    """Every parameter is used; the embedding's gradient is the last.

    The order in which gradients become ready is not that of registration turned around. On a GPU, they are summed in
    one order. Matrices of width 64 fill shards without padding.
    """

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Linear(VOCABULARY, width)
        self.layers = nn.ModuleList(
            [*[nn.Linear(width, width) for _ in range(4)], nn.Linear(width, VOCABULARY)]
        )

    def loss(self, ids: torch.Tensor, targets: torch.Tensor, rank: int) -> torch.Tensor:
        weight = self.embedding.weight
        x = self.embedding(nn.functional.one_hot(ids.to(weight.device), VOCABULARY).to(weight.dtype))
        for number in (2, 0, 3, 1, 4):
            x = self.layers[number](x)
        return nn.functional.cross_entropy(x, targets.to(x.device))


def explode(gradient: torch.Tensor) -> None:
    raise ZeroDivisionError


def seeded_model(
    seed: int, ranks: Ranks, dtype: torch.dtype = torch.float64, kind: Callable = HardModel
) -> Any:
    torch.manual_seed(seed)
    return kind().to(ranks.device, dtype)


def kind_for(strategy: str) -> Callable:
    """The hardest model that the strategy takes: under `fsdp` layers come in the same order on all ranks."""
    return OrderlyModel if strategy == "fsdp" else HardModel


def noise(ranks: Ranks, on_gpu: float) -> float:
    """The tolerance between runs of the same arithmetic: GPUs add the rows of embeddings' gradients in any order."""
    return 0.0 if ranks.device.type == "cpu" else on_gpu


def batch(step: int, rank: int, micro: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    ids = torch.randint(0, VOCABULARY, (8,), generator=generator)
    return ids, torch.randint(0, VOCABULARY, (8,), generator=generator)


def groups_of(model: nn.Module) -> list[dict]:
    """Matrices decay, the rest does not."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]


def adamw(groups: Iterable[dict]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(groups), lr=0.02, betas=(0.9, 0.95), eps=1e-6)


def our_adamw(groups: Iterable[dict]) -> torch.optim.Optimizer:
    return AdamW(list(groups), lr=0.02, betas=(0.9, 0.95), eps=1e-6)


def sgd(groups: Iterable[dict]) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(groups), lr=0.05, momentum=0.9, nesterov=True)


def plain(make: Callable) -> Callable:
    """The groups without their options."""
    return lambda groups: make([{"params": group["params"]} for group in groups])


def joined_run(
    model: Any, world_size: int, passes: Sequence[int], max_norm: float = INFINITY, make: Callable = adamw
) -> list[float]:
    """One process trains on all ranks' batches at once, in so many passes a step; returns the gradient norms."""
    optimizer = make(groups_of(model))
    parameters = [p for p in model.parameters() if p.requires_grad]
    norms = []
    for step, count in enumerate(passes):
        for rank, micro in itertools.product(range(world_size), range(count)):
            (model.loss(*batch(step, rank, micro), rank) / (world_size * count)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(parameters, max_norm)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return norms


def build(strategy: str, ranks: Ranks, config: ParallelConfig = SMALL_BUCKETS) -> Strategy:
    own = {"find_unused_parameters": True} if strategy == "torch_ddp" else config.options
    return build_strategy(config.model_copy(update={"strategy": strategy, "options": own}), ranks)


def start(strategy: str, model: nn.Module, ranks: Ranks, make: Callable = adamw, **keys: Any) -> tuple:
    """(strategy, module to call, optimizer)."""
    sync = build(strategy, ranks, SMALL_BUCKETS.model_copy(update=keys))
    call = sync.attach(model)
    return sync, call, sync.build_optimizer(make, groups_of(model))


def one_step(
    sync: Strategy,
    call: Any,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
    step: int,
    *,
    passes: int = 1,
    max_norm: float | None = INFINITY,
    wait: bool = True,
    set_to_none: bool = True,
    look: Callable[[Any, torch.optim.Optimizer], object] = lambda *_: None,
) -> float:
    """A step on this rank's batches; returns the gradient norm (`max_norm` None: measures nothing, returns NaN)."""
    for micro in range(passes):
        with nullcontext() if micro == passes - 1 else sync.no_sync():
            (call.loss(*batch(step, ranks.rank, micro), ranks.rank) / passes).backward()
    sync.finish(wait=wait)
    look(call, optimizer)
    norm = float("nan") if max_norm is None else float(sync.clip_gradients(max_norm))
    optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)
    return norm


def assert_equals_joined_run(
    ranks: Ranks,
    strategy: str,
    passes: Sequence[int],
    *,
    max_norm: float | None = None,
    make: Callable = adamw,
    kind: Callable | None = None,
    keys: Mapping[str, Any] = MappingProxyType({}),
    **how: Any,
) -> tuple[Any, torch.optim.Optimizer]:
    """The weights, and the norms if it clips, are those of training on the joined batch; returns (model, optimizer).

    `look(module, optimizer)` is called in every step when gradients are reduced; `keys` are of [parallel].
    """
    kind = kind or kind_for(strategy)
    oracle = seeded_model(0, ranks, kind=kind)
    limit = INFINITY if max_norm is None else max_norm
    expected = joined_run(oracle, ranks.world_size, passes, limit, make=make)
    model = seeded_model(ranks.rank, ranks, kind=kind)  # rank 0's values must win
    sync, call, optimizer = start(strategy, model, ranks, make, **keys)
    steps = {"max_norm": max_norm, **how}
    norms = [
        one_step(sync, call, optimizer, ranks, n, passes=count, **steps) for n, count in enumerate(passes)
    ]
    sync.wait_for_weights()
    if max_norm is not None:
        assert norms == pytest.approx(expected, rel=1e-9)
        assert min(expected) > max_norm, "clipping must have been at work"
    assert_close_models(model, oracle, FLOAT64_TOLERANCE)
    assert_same_on_all_ranks(model, ranks)
    return model, optimizer


def assert_same_on_all_ranks(model: nn.Module, ranks: Ranks) -> None:
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        everyone = [torch.empty_like(value, requires_grad=False) for _ in range(ranks.world_size)]
        dist.all_gather(everyone, value.detach().contiguous())
        for rank, other in enumerate(everyone):
            assert torch.equal(other, everyone[0]), f"{name} of rank {rank} differs from rank 0's"


def assert_close_models(mine: nn.Module, oracle: nn.Module, tolerance: float) -> None:
    expected = dict(oracle.named_parameters())
    for name, value in mine.named_parameters():
        difference = (value.detach() - expected[name].detach()).abs().max().item()
        assert difference <= tolerance, f"{name} is off by {difference:.3g}"


@contextmanager
def gathered_when_waited_for() -> Iterator[None]:
    """Inside, gathered weights are old until they are waited for, however fast the ranks are."""
    all_gather = Averager.all_gather

    def late(self: Averager, flat: torch.Tensor) -> SimpleNamespace:
        copy = flat.clone()
        work = all_gather(self, copy)
        return SimpleNamespace(wait=lambda: (work.wait(), flat.copy_(copy)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Averager, "all_gather", late)
        yield


# Name -> what runs on every rank.
CHECKS: dict[str, Callable[[Ranks], None]] = {}


def check(**choices: Iterable[Any]) -> Callable:
    """Add a function `check_...(ranks, **arguments)` to the checks, once for every combination of arguments."""

    def add(function: Callable) -> Callable:
        base = function.__name__.removeprefix("check_").replace("_", " ")
        for values in itertools.product(*choices.values()):
            shown = [getattr(value, "__name__", None) or str(value) for value in values]
            CHECKS[": ".join(filter(None, (base, ", ".join(shown))))] = partial(
                function, **dict(zip(choices, values, strict=True))
            )
        return function

    return add
