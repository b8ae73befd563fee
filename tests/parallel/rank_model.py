"""What the checks on several ranks share: a small model with everything that makes synchronising gradients hard, the
run that is its oracle, a training under any strategy, and the list of checks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lmkit.errors import LmkitError
from lmkit.optim.adamw import AdamW
from lmkit.parallel.protocol import GradientSync, build_strategy
from lmkit.parallel.ranks import Ranks
from lmkit.recipe.tables import ParallelConfig

VOCABULARY, WIDTH = 13, 6


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

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
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
        self.to(dtype)

    def loss(self, ids: torch.Tensor, targets: torch.Tensor, rank: int) -> torch.Tensor:
        ids, targets = ids.to(self.scale.device), targets.to(self.scale.device)
        x = self.embedding(ids)  # (rows, width)
        for layer in self.layers if rank % 2 == 0 else reversed(self.layers):
            x = layer(x)
        x = self.frozen(x)
        x = torch.cat([x[:, :3] + self.shift, x[:, 3:]], dim=1) * self.scale
        if rank == 1:
            x = x + self.sometimes(x)
        return nn.functional.cross_entropy(self.head(x), targets)

    forward = loss


def batch(step: int, rank: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
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


def joined_run(
    model: nn.Module,
    *,
    world_size: int,
    steps: int,
    accumulation: int,
    max_norm: float,
    make: Callable[[list[dict]], torch.optim.Optimizer] = adamw,
) -> list[float]:
    """One process trains on all ranks' batches at once; returns the gradient norms."""
    optimizer = make(groups_of(model))
    parameters = [p for p in model.parameters() if p.requires_grad]
    norms = []
    for step in range(steps):
        for rank in range(world_size):
            for micro in range(accumulation):
                loss = model.loss(*batch(step, rank, micro), rank)
                (loss / (world_size * accumulation)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(parameters, max_norm)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return norms


SMALL_BUCKETS = ParallelConfig(bucket_mb=0.0003)  # about 300 bytes: several buckets even in this model
INSIDE = ("overlap", "bucketed", "zero1")  # communicate inside the backward pass
STRATEGIES = ("naive", "flat", "overlap", "bucketed", "torch_ddp", "zero1")

# The same sums in another order, in float64: rounding of 1e-16 that Adam's division and clipping amplify.
FLOAT64_TOLERANCE = 1e-10


def build(strategy: str, ranks: Ranks, config: ParallelConfig = SMALL_BUCKETS) -> GradientSync:
    own = {"find_unused_parameters": True} if strategy == "torch_ddp" else {}
    return build_strategy(config.model_copy(update={"strategy": strategy, "options": own}), ranks)


def train(
    sync: GradientSync,
    model: nn.Module,
    ranks: Ranks,
    *,
    steps: int,
    accumulation: int = 1,
    max_norm: float = float("inf"),
    make: Callable = adamw,
) -> tuple[list[float], torch.optim.Optimizer]:
    call = sync.attach(model)
    optimizer = sync.build_optimizer(make, groups_of(model))
    norms = [
        one_step(sync, call, optimizer, ranks, step, accumulation=accumulation, max_norm=max_norm)
        for step in range(steps)
    ]
    sync.wait_for_weights()
    return norms, optimizer


def accumulate(sync, call, ranks, step: int, accumulation: int) -> None:
    """The forward and backward passes of a step."""
    for micro in range(accumulation):
        with nullcontext() if micro == accumulation - 1 else sync.no_sync():
            loss = call.loss(*batch(step, ranks.rank, micro), ranks.rank)
            (loss / accumulation).backward()


def one_step(sync, call, optimizer, ranks, step, *, accumulation=1, max_norm=float("inf")) -> float:
    accumulate(sync, call, ranks, step, accumulation)
    sync.finish()
    norm = float(sync.clip_gradients(max_norm))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def seeded_model(seed: int, ranks: Ranks, dtype: torch.dtype = torch.float64) -> HardModel:
    torch.manual_seed(seed)
    return HardModel(dtype).to(ranks.device)


def assert_same_on_all_ranks(model: nn.Module, ranks: Ranks) -> None:
    for name, value in model.state_dict().items():
        everyone = [torch.empty_like(value) for _ in range(ranks.world_size)]
        dist.all_gather(everyone, value.contiguous())
        for rank, other in enumerate(everyone):
            assert torch.equal(other, everyone[0]), f"{name} of rank {rank} differs from rank 0's"


def assert_close_models(mine: nn.Module, oracle: nn.Module, tolerance: float) -> None:
    expected = dict(oracle.named_parameters())
    for name, value in mine.named_parameters():
        difference = (value.detach() - expected[name].detach()).abs().max().item()
        assert difference <= tolerance, f"{name} is off by {difference:.3g}"


@contextmanager
def refused(code: str, kind: type[LmkitError] = LmkitError, *names: str) -> Iterator[None]:
    """The block must raise this error, with a hint and these names in its message."""
    with pytest.raises(kind) as caught:
        yield
    assert caught.value.code == code
    assert caught.value.hint
    assert all(name in caught.value.message for name in names), caught.value.message


def plain(make: Callable) -> Callable:
    """The groups without their options."""
    return lambda groups: make([{"params": group["params"]} for group in groups])


CHECKS: dict[str, Callable[[Ranks], None]] = {}
"""Name -> what runs on every rank."""


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
