"""A module whose gradients are averaged over the ranks of the existing process group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lmkit.core.buckets import on_gradient
from lmkit.errors import UsageError
from lmkit.parallel.buckets import at_end_of_pass
from lmkit.parallel.ranks import Ranks
from lmkit.parallel.strategy import build_strategy, trainable_parameters
from lmkit.recipe.tables import ParallelConfig
from lmkit.registry import STRATEGIES


class DataParallel(nn.Module):
    """Wrap a module so that its gradients are the mean over the ranks when a backward pass ends.

        model = DataParallel(model)                       # every rank takes rank 0's parameters and buffers
        loss_function(model(inputs), targets).backward()  # each rank with its own part of the batch
        optimizer.step()

    Works with gloo and NCCL, on CPUs and GPUs. Without a process group it changes nothing. Create the optimizer from
    `model.parameters()` as usual; `ShardedOptimizer` shards its state. Buffers are broadcast once, at the start.

    Args:
        module: must have the same names, ties, shapes, dtypes and frozen parameters on every rank.
        strategy: a name of `lmkit.registry.STRATEGIES` that does not shard.
        options: keys of [parallel] that the strategy uses (`bucket_mb`, `reduce_dtype`), or its own options.

    Attributes:
        module: the wrapped module.

    Raises:
        UsageError: no such strategy, an option that it does not have, or a strategy that shards.
        LmkitError: the modules differ between ranks.
    """

    def __init__(self, module: nn.Module, strategy: str = "bucketed", **options: Any) -> None:
        super().__init__()
        name = STRATEGIES.canonical(strategy)
        if STRATEGIES.facts(name).shards:
            raise UsageError(
                "parallel.strategy_shards",
                f"DataParallel: {name} shards more than gradients",
                hint="use DataParallel with ShardedOptimizer, or build_strategy",
            )
        table = {key: options.pop(key) for key in list(options) if key in ParallelConfig.model_fields}
        ranks = Ranks.current()
        self._sync = build_strategy(ParallelConfig(strategy=name, **table, options=options), ranks)
        self.module = module
        # Not registered as a submodule: the strategy may wrap the module once more.
        self.__dict__["_call"] = self._sync.attach(module)
        self._is_accumulating = False
        self._is_finished = False  # whether the end of a backward pass has averaged the gradients
        self._is_running = False  # whether a backward pass runs that will average them
        self._ending: Callable[[], object] = lambda: None
        if ranks.world_size > 1:
            for parameter in trainable_parameters(module):
                on_gradient(parameter, self._on_gradient)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._is_finished = False
        if self._is_running and torch._C._current_graph_task_id() == -1:  # no pass runs: the last one raised
            self._sync.reset()
            self._is_running = False
        return self._call(*args, **kwargs)  # type: ignore[operator]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate the gradients of the passes inside, without communication. Enter it before the forward pass."""
        before, self._is_accumulating = self._is_accumulating, True
        try:
            with self._sync.no_sync():
                yield
        finally:
            self._is_accumulating = before

    def finish_gradient_synchronization(self) -> None:
        """Average the gradients, unless the end of the backward pass has done it.

        A rank whose backward pass reached no parameter must call it: the other ranks wait for its part.
        """
        if not self._is_finished:
            self._sync.finish()
        self._is_finished = False

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if self._is_accumulating or (self._is_running and self._ending() is not None):
            return

        def ends() -> None:
            self._sync.finish()
            self._is_finished, self._is_running = True, False

        self._is_running, self._ending = True, at_end_of_pass(ends)
