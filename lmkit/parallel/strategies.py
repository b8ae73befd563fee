"""The ladder of gradient synchronisation: one Protocol, one class per strategy, found by name.

A training step on every rank, whatever the strategy:

    sync = build_strategy("bucketed", ranks)
    call = sync.attach(model)                        # once; `call` stands for the model from here on
    optimizer = sync.build_optimizer(make, groups)   # once; make(groups) -> torch.optim.Optimizer

    for micro, (inputs, targets) in enumerate(batches):
        last = micro == len(batches) - 1
        with nullcontext() if last else sync.no_sync():   # decided before the forward
            (call.loss(inputs, targets) / len(batches)).backward()
    sync.finish(wait=False)                          # clipping and the optimizer wait for what they read
    norm = sync.clip_gradients(max_norm)             # the same value on every rank; not finite on one: on all
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import nn

from lmkit.parallel.process_group import Ranks
from lmkit.parallel.traffic import Traffic
from lmkit.registry import STRATEGIES

ParameterGroups = list[dict[str, Any]]
MakeOptimizer = Callable[[ParameterGroups], torch.optim.Optimizer]


@dataclass(frozen=True)
class SyncOptions:
    """What a recipe can say about a strategy; its registration names the options that it uses.

    Attributes:
        bucket_mb: how much is reduced in one call, in MiB (2^20 bytes). Every call costs the host some 0.1 ms, and
            what the last ones move is not hidden: 50 is best or near it for models that keep a GPU busy. Where the
            host is the bottleneck (small layers, not compiled) give more: 1000.
        wire_dtype: in what numbers gradients travel and are summed.
        weights: `zero1` only; "bf16" casts the model's parameters and keeps fp32 masters in the shards.
        gather: `zero1` only; how a rank gets the weights that the others stepped. "auto": it reads them from the
            other GPUs' memory where all ranks are on one host and its GPUs reach one another; elsewhere, and with
            "collective", the backend gathers.
    """

    bucket_mb: float = 50.0
    wire_dtype: Literal["fp32", "bf16"] = "fp32"
    weights: Literal["fp32", "bf16"] = "fp32"
    gather: Literal["auto", "collective"] = "auto"

    def __post_init__(self) -> None:
        if self.bucket_mb <= 0:
            raise ValueError(f"bucket_mb must be positive, got {self.bucket_mb}")
        for name in ("wire_dtype", "weights"):
            if getattr(self, name) not in ("fp32", "bf16"):
                raise ValueError(f"{name} must be fp32 or bf16, got {getattr(self, name)!r}")
        if self.gather not in ("auto", "collective"):
            raise ValueError(f"gather must be auto or collective, got {self.gather!r}")


class GradientSync(Protocol):
    """Keeps the replicas of a model equal. Not thread-safe; one instance serves one model."""

    traffic: Traffic

    def attach(self, model: nn.Module, *, fingerprint: str = "") -> nn.Module:
        """Check that all ranks hold the same model (names, shapes, dtypes, `fingerprint`), take rank 0's
        values, install what the strategy needs; return the module to call (it has the model's `loss`).

        Raises:
            LmkitError: models or fingerprints differ between ranks, on every rank.
        """

    def build_optimizer(self, make: MakeOptimizer, groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
        """Make the optimizer for these parameter groups; under `zero1` it holds only this rank's shard."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Gradients of the forward and backward passes inside only accumulate. Enter it before the forward.

        Every backward pass of a step but the last belongs inside. Strategies that communicate during the pass
        (`overlap`, `bucketed`, `zero1`) raise an LmkitError where the next one begins, or `no_sync` is entered, and
        neither `finish` nor `reset` was called since.
        """

    def finish(self, *, wait: bool = True) -> None:
        """Call after the last backward of a step: on return every gradient is the mean over the ranks
        (on GPUs: for whatever is then launched on the current stream).

        With `wait=False` the last gradients may still be on their way: `clip_gradients`, and the step of the
        optimizer that `build_optimizer` made, wait for what they read, and have something to do meanwhile. Only for
        who reads gradients through nothing else.
        """

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Scale the reduced gradients to a global norm of at most `max_norm`; return the norm before that.

        Our AdamW scales them when its step reads them: `parameter.grad` then stays as it is.
        The norm is a tensor on the device: nothing here waits for the GPU. It is the same on every rank.
        `max_norm=inf` only measures.
        """

    def wait_for_weights(self) -> None:
        """Call before parameters are read other than through the model's call, `loss` or `state_dict`: `zero1`
        may still be gathering them after `optimizer.step()`.

        It says nothing of the other ranks, which may still be reading this one's: load or change weights on all
        ranks, and after a barrier behind this call where a rank could read them in between.
        """

    def reset(self) -> None:
        """Forget a step that broke off (an exception in backward), or one whose gradients are not wanted and that
        `finish` was not called for, so that the next one starts clean. On all ranks, after the same passes."""


def build_strategy(name: str, ranks: Ranks, options: SyncOptions | None = None) -> GradientSync:
    """Make the strategy called `name`, or one of its aliases.

    Raises:
        UsageError: no such strategy.
    """
    strategy: GradientSync = STRATEGIES.load(name)(ranks, options or SyncOptions())
    return strategy
