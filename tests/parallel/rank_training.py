"""What the checks inside a process group share: a training under any strategy, and what must hold after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
from rank_model import HardModel, adamw, batch, groups_of
from torch import nn

from lmkit.errors import LmkitError
from lmkit.parallel.protocol import GradientSync, build_strategy
from lmkit.parallel.ranks import Ranks
from lmkit.recipe.tables import ParallelConfig

SMALL_BUCKETS = ParallelConfig(bucket_mb=0.0003)  # about 300 bytes: several buckets even in this model
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


def one_step(sync, call, optimizer, ranks, step, *, accumulation=1, max_norm=float("inf")) -> float:
    for micro in range(accumulation):
        with nullcontext() if micro == accumulation - 1 else sync.no_sync():
            loss = call.loss(*batch(step, ranks.rank, micro), ranks.rank)
            (loss / accumulation).backward()
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


def feed(sync: GradientSync, parameters: list[nn.Parameter], gradients: list[torch.Tensor]) -> None:
    """The same gradients on every rank: their mean is exactly they (the world is a power of two)."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    sync.finish()
