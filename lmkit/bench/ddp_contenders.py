"""The contenders of `lmkit bench ddp`: one model and optimizer each, kept equal by one strategy."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lmkit.errors import UsageError
from lmkit.measure.memory import release_memory
from lmkit.model.transformer import TransformerLM, compile_model
from lmkit.optim.adamw import AdamW, decay_groups
from lmkit.parallel.collectives import Traffic
from lmkit.parallel.protocol import GradientSync, build_strategy
from lmkit.parallel.ranks import Ranks, release_collectives
from lmkit.recipe.tables import ModelConfig, ParallelConfig
from lmkit.registry import STRATEGIES

ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8}
WEIGHT_DECAY = 0.1


@dataclass(frozen=True)
class DdpCase:
    """A model and what one rank feeds it per step.

    Attributes:
        rows: sequences of `model.context_length` tokens per rank and step.
        precision: "bf16" (autocast around fp32 weights, or bf16 weights under "zero1 bf16") or "fp32".
    """

    name: str
    model: ModelConfig
    rows: int
    precision: str = "bf16"

    @property
    def tokens_per_step(self) -> int:
        """Of one rank."""
        return self.rows * self.model.context_length


class Contender:
    """A training loop body: forward, backward, synchronisation, optimizer."""

    def __init__(
        self, case: DdpCase, ranks: Ranks, sync: GradientSync, make: Callable, *, weights: str
    ) -> None:
        self.sync = sync
        self.ranks = ranks
        torch.manual_seed(0)
        self.model = TransformerLM(case.model, device=ranks.device)
        compile_model(self.model, case.model.compile)
        self._call = sync.attach(self.model)
        self.optimizer = sync.build_optimizer(make, decay_groups(self.model.parameters(), WEIGHT_DECAY))
        self._autocast = case.precision == "bf16" and weights == "fp32"
        generator = torch.Generator().manual_seed(1000 + ranks.rank)
        shape = (4, case.rows, case.model.context_length + 1)
        vocabulary = case.model.vocab_size
        assert vocabulary is not None
        self._tokens = torch.randint(vocabulary, shape, generator=generator).to(ranks.device)
        self._next = 0

    def step(self) -> torch.Tensor:
        """One step; returns the loss before it."""
        tokens = self._tokens[self._next % len(self._tokens)]
        self._next += 1
        loss = self.backward(tokens)
        self.sync.finish(wait=False)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def backward(self, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Forward and backward alone; gradients are left in place."""
        tokens = self._tokens[0] if tokens is None else tokens
        with self._precision():
            loss: torch.Tensor = self._call.loss(  # type: ignore[operator]
                tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
            )
        loss.backward()
        return loss.detach()

    def communicate(self) -> None:
        """All of a step's gradient reduction and none of its arithmetic."""
        self.sync.finish()

    def _precision(self) -> AbstractContextManager:
        return torch.autocast(self.ranks.device.type, torch.bfloat16) if self._autocast else nullcontext()


def begin_account(ranks: Ranks) -> None:
    """Call before a contender is built whose memory counts: on return the allocator holds nothing of an earlier one
    that would be freed on this one's account. A collective."""
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)
        release_collectives(ranks)
    release_memory(ranks.device)


def make_adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """PyTorch's fused AdamW, the same for all who differ in how they reduce gradients."""
    return torch.optim.AdamW(groups, fused=True, **ADAMW)


def make_our_adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The optimizer that `zero1` is made to work with; its rival has what PyTorch recommends with it."""
    return AdamW(groups, **ADAMW)


def make_redundancy_free_adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """PyTorch's ZeRO-1: whole parameters dealt out to the ranks, broadcast after the step."""
    # Its package compiles deprecated TorchScript when it is imported, with a warning: only where it is asked for.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    parameters = [parameter for group in groups for parameter in group["params"]]
    return ZeroRedundancyOptimizer(
        parameters,
        optimizer_class=torch.optim.AdamW,
        parameters_as_bucket_view=True,
        fused=True,
        weight_decay=WEIGHT_DECAY,
        **ADAMW,
    )


def _count_broadcasts(traffic: Traffic, optimizer: Any, *_: Any) -> None:
    """What PyTorch's ZeRO-1 has sent in its step: the parameters dealt to each rank, one tensor a rank."""
    for of_device in optimizer._buckets:
        for of_rank in of_device:
            traffic.count_broadcast(of_rank.nbytes, optimizer.world_size)


# What stands for one GPU runs on rank 0 alone, while the other ranks wait.
SOLO = ("one rank", "one rank, bf16 weights")
SHARDED = ("zero1", "torch_ddp + ZeRO")
"""How the names begin of those whose ranks hold a share of the optimizer state each."""


def baseline_of(name: str) -> str:
    """What one rank does with the same weights."""
    return SOLO[1] if "bf16" in name.replace("bf16 wire", "").split() else SOLO[0]


TORCH_VARIANTS = ("default", "static", "+ ZeRO")
TORCH_BUCKET_MB = 25.0  # the default of its own


def contender(name: str, case: DdpCase, ranks: Ranks) -> Contender:
    """Build a contender on every rank (those of `SOLO` on rank 0 alone).

    Names: "one rank", "one rank, bf16 weights", a strategy, a strategy with options ("bucketed 100 MB",
    "bucketed bf16 wire", "zero1 bf16", "zero1 bf16 collective"), or a rival of PyTorch's: "torch_ddp" (gradients as
    views of the buckets; 25 MiB each, unless "torch_ddp 50 MB" says otherwise), "torch_ddp default", "torch_ddp
    static", "torch_ddp + ZeRO".

    Raises:
        UsageError: no such contender.
    """
    strategy, detail, options = parse_name(name)
    make: Callable = make_our_adamw if strategy == "zero1" or options.weights == "bf16" else make_adamw
    if name in SOLO:
        alone = Ranks(device=ranks.device)
        return Contender(case, alone, build_strategy(options, alone), make, weights=options.weights)
    if strategy == "torch_ddp":
        if detail == "+ ZeRO":
            make = make_redundancy_free_adamw
        own = {"gradient_as_bucket_view": detail != "default", "static_graph": detail == "static"}
        sync = build_strategy(options.model_copy(update={"options": own}), ranks)
        built = Contender(case, ranks, sync, make, weights=options.weights)
        if detail == "+ ZeRO":
            built.optimizer.register_step_post_hook(partial(_count_broadcasts, sync.traffic))
        return built
    return Contender(case, ranks, build_strategy(options, ranks), make, weights=options.weights)


def parse_name(name: str, bench: str = "ddp") -> tuple[str, str, ParallelConfig]:
    """(strategy, the words after it, options) of a contender.

    Args:
        bench: the command whose recipe table names it, for the error.

    Raises:
        UsageError: no such contender.
    """
    if name in SOLO:
        is_narrow = name == SOLO[1]
        return (
            name,
            "",
            ParallelConfig(strategy="zero1", weights="bf16")
            if is_narrow
            else ParallelConfig(strategy="none"),
        )
    strategy, _, detail = name.partition(" ")
    is_torch = strategy == "torch_ddp"
    named = {} if is_torch and detail in TORCH_VARIANTS else _named_options(detail)
    if (
        strategy not in STRATEGIES.names
        or named is None
        or not named.keys() <= set(STRATEGIES.facts(strategy).uses)
    ):
        known = (*SOLO, *STRATEGIES.names, *(f"torch_ddp {variant}" for variant in TORCH_VARIANTS))
        raise UsageError(
            f"bench.{bench}.contenders: there is no {name!r}",
            hint=f"{'; '.join(known)}; or with options that the strategy heeds: bucketed 100 MB; zero1 bf16; "
            "flat bf16 wire",
        )
    if is_torch:
        named = {"bucket_mb": TORCH_BUCKET_MB, **named}
    return strategy, detail, ParallelConfig(strategy=strategy, **named)


_SIZE = re.compile(r"\d*\.?\d+(e[+-]?\d+)?")


def _named_options(detail: str) -> dict[str, Any] | None:
    """Return the keys of [parallel] that "100 MB bf16 wire" names; None if it has another word, or one twice."""
    words = detail.split()
    named: dict[str, Any] = {}
    while words:
        said: dict[str, Any]
        match words:
            case ["bf16", "wire", *words]:
                said = {"reduce_dtype": "bf16"}
            case ["bf16", *words]:
                said = {"weights": "bf16"}
            case ["collective", *words]:
                said = {"gather": "collective"}
            case [number, "MB", *words] if _SIZE.fullmatch(number) and 0 < float(number) < math.inf:
                said = {"bucket_mb": float(number)}
            case _:
                return None
        if said.keys() & named.keys():
            return None
        named |= said
    return named
