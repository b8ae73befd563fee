"""For a training loop of your own, in the existing process group: `DataParallel`, `ShardedOptimizer` and `FSDP`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from lmkit.core.adamw import loss_of
from lmkit.core.buckets import MIB, on_gradient
from lmkit.core.step import clip_for, gradient_norm
from lmkit.errors import UsageError
from lmkit.parallel.buckets import at_end_of_pass, runs_backward
from lmkit.parallel.collectives import Averager, Traffic, norm_over_ranks
from lmkit.parallel.fsdp import Fsdp
from lmkit.parallel.gather import Gather, Links
from lmkit.parallel.ranks import Ranks
from lmkit.parallel.strategy import build_strategy, present_gradients, trainable_parameters
from lmkit.parallel.zero1 import KeptShards, Zero1Optimizer, plan_shards
from lmkit.recipe.tables import ParallelConfig
from lmkit.registry import STRATEGIES


class DataParallel(nn.Module):
    """Wrap a module so that its gradients are the mean over the ranks when a backward pass ends.

        model = DataParallel(model)  # every rank takes rank 0's parameters and buffers, once
        loss_function(model(inputs), targets).backward()  # each rank with its own part of the batch
        optimizer.step()

    Works with gloo and NCCL. Without a process group it changes nothing. Create the optimizer from
    `model.parameters()` as usual; `ShardedOptimizer` shards its state.

    Args:
        module: must have the same names, ties, shapes, dtypes and frozen parameters on every rank.
        strategy: a name of `lmkit.registry.STRATEGIES` that does not shard.
        options: keys of [parallel] that the strategy uses (`bucket_mb`, `reduce_dtype`), or its own options.

    Raises:
        UsageError: no such strategy, an option that it does not have, or a strategy that shards.
        LmkitError: the modules differ between ranks.
    """

    def __init__(self, module: nn.Module, strategy: str = "bucketed", **options: Any) -> None:
        super().__init__()
        name = STRATEGIES.entry(strategy).name
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
        self._frozen = _frozen(module.parameters()) if ranks.world_size > 1 else []
        # Not a submodule: the strategy may wrap the module once more.
        self.__dict__["_call"] = self._sync.attach(module)
        self._is_finished = False  # whether the end of a backward pass has averaged the gradients
        self._is_running = False  # whether a backward pass runs that will average them
        self._ending: Callable[[], object] = lambda: None
        if ranks.world_size > 1:
            for parameter in trainable_parameters(module):
                on_gradient(parameter, self._on_gradient)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        _refuse_unfrozen(self._frozen, "DataParallel")
        self._is_finished = False
        if self._is_running and not runs_backward():  # the last pass raised
            self._sync.reset()
            self._is_running = False
        return self._call(*args, **kwargs)  # type: ignore[operator]

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate the gradients of the passes inside, without communication. Enter it before the forward pass."""
        return self._sync.no_sync()

    def finish_gradient_synchronization(self) -> None:
        """Average the gradients, unless the end of the backward pass has done it: a rank whose backward pass reached
        no parameter must call it."""
        if not self._is_finished:
            self._sync.finish()
        self._is_finished = False

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if self._sync.is_accumulating or (self._is_running and self._ending() is not None):
            return

        def ends() -> None:
            self._sync.finish()
            self._is_finished, self._is_running = True, False

        self._is_running, self._ending = True, at_end_of_pass(ends)


class ShardedOptimizer(Zero1Optimizer):
    """Shard the state of any element-wise optimizer over the ranks.

        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4)
        loss.backward()        # the gradients must be averaged: with `DataParallel`, or PyTorch's DDP
        optimizer.step()       # afterwards every rank has all updated parameters

    The parameters move into flat buckets (`parameter.data` becomes a view), so create it after the model is on its
    device. Each rank updates 1/W of all elements and gathers the others. Frozen parameters, and parameters without a
    gradient, keep their values.

    Args:
        params: parameters or parameter groups.
        optimizer_class: a class of `torch.optim`, or `lmkit.optim.AdamW`.
        options: its keyword arguments.

    Raises:
        ValueError: a parameter is in two groups, or the optimizer looks at whole matrices.
    """

    def __init__(
        self, params: Iterable[Any], optimizer_class: Callable[..., torch.optim.Optimizer], **options: Any
    ) -> None:
        if (name := getattr(optimizer_class, "__name__", "")) in _NOT_ELEMENTWISE:
            raise ValueError(f"{name} does not update every element by itself: it cannot step shards")
        ranks = Ranks.current()
        alone = ranks.world_size == 1
        self._links = Links(ranks, None if alone else Gather(Averager(ranks, Traffic())))
        self._given: list[list[nn.Parameter]] = []
        self._frozen: list[nn.Parameter] = []
        listed = list(params)
        groups = [{"params": listed}] if not listed or isinstance(listed[0], torch.Tensor) else listed
        buckets = [bucket for group in groups for bucket in self._shard(group["params"])]
        given = [{**group, "params": mine} for group, mine in zip(groups, self._given, strict=True)]
        super().__init__(lambda shards: optimizer_class(shards, **options), given, buckets, ranks)
        self.param_groups = [
            {**inner, "params": mine}
            for inner, mine in zip(self.inner.param_groups, self._given, strict=True)
        ]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Shard the parameters of another group, too."""
        if not hasattr(self, "_step_parts"):  # torch.optim.Optimizer's constructor calls it
            super().add_param_group(param_group)
            return
        buckets = self._shard(param_group["params"])
        parts = [piece.part for bucket in buckets for piece in bucket.held()]
        self.inner.add_param_group({**param_group, "params": parts})
        self.param_groups.append({**self.inner.param_groups[-1], "params": self._given[-1]})
        self._own(buckets)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters by gradients that are equal on all ranks. Collective."""
        _refuse_unfrozen(self._frozen, "ShardedOptimizer")
        loss = None if closure is None else loss_of(closure)
        for mine, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({**mine, "params": inner["params"]})  # a schedule may have set "lr"
        self.unused = {p for bucket in self._flats for p in bucket.parameters if p.grad is None}
        for bucket in self._flats:
            if not self.unused.issuperset(bucket.parameters):
                _take_own_gradients(bucket)
        self._step()
        for bucket in self._flats:
            bucket.wait_gathered()
        return loss

    @torch.no_grad()
    def _shard(self, given: Any) -> list[KeptShards]:
        """Move a group's parameters into buckets; remember the group."""
        parameters = [given] if isinstance(given, nn.Parameter) else list(dict.fromkeys(given))
        if not {parameter for group in self._given for parameter in group}.isdisjoint(parameters):
            raise ValueError("a parameter is in more than one parameter group")
        number = len(self._given)
        self._given.append(parameters)
        self._frozen += _frozen(parameters)
        names = {parameter: f"{number}.{index}" for index, parameter in enumerate(parameters)}
        planned = plan_shards([parameters], names, capacity=_BUCKET_BYTES, weights="fp32")
        return [KeptShards(bucket, names, self._links) for _, bucket in planned]


def _frozen(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if not parameter.requires_grad]


def _refuse_unfrozen(frozen: list[nn.Parameter], owner: str) -> None:
    """Refuse parameters that require gradients now and did not when `owner` took them: their gradients would stay on
    this rank, or nothing would update them."""
    if count := len(frozen) - len(_frozen(frozen)):
        raise UsageError(
            "parallel.unfrozen",
            f"{owner}: parameters that were frozen when it was made require gradients now: {count}",
            hint=f"set requires_grad first, then make {owner}",
        )


def _take_own_gradients(bucket: KeptShards) -> None:
    """Take this rank's part of already averaged gradients; zeros for parameters without one."""
    bucket.gradient = torch.zeros_like(bucket.shard)
    for piece in bucket.held():
        if piece.parameter.grad is not None:
            bucket.gradient[piece.in_shard] = piece.parameter.grad.reshape(-1)[piece.own]


_BUCKET_BYTES = 50 * MIB
_NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon", "SparseAdam")


class FSDP(nn.Module):
    """Wrap a module so that every rank holds a share of its parameters, gradients and optimizer state.

        model = FSDP(model, compute_dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        loss_function(model(inputs), targets).backward()   # each rank with its own part of the batch
        model.clip_grad_norm_(1.0)
        optimizer.step()

    `parameters` and `named_parameters` return this rank's elements, flat. A backward pass adds the mean gradients of
    all ranks to theirs. The optimizer must update every element by itself. Every rank must call the same layers (see
    `Fsdp`) in the same order. `state_dict` returns whole weights on the CPU; `load_state_dict` takes whole weights.

    Args:
        module: the same on every rank; all take rank 0's values. On "meta", layers are initialised one by one.
        compute_dtype: dtype to which gathered fp32 weights and inputs are cast; None: no cast.
        reshard_after_forward: free a layer's weights between its forward and its backward pass.

    Raises:
        LmkitError: the modules differ between ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        *,
        reshard_after_forward: bool = True,
    ) -> None:
        super().__init__()
        config = ParallelConfig(strategy="fsdp", options={"reshard_after_forward": reshard_after_forward})
        self._sync = _FinishedByThePass(Ranks.current(), config)
        self._sync.compute_dtype = compute_dtype
        self._sync.attach(module)
        self.module = module
        self._frozen = _frozen(module.parameters())
        self._slices: dict[nn.Parameter, Any] = {}
        for piece in (piece for flat in self._sync._flats if flat.trains for piece in flat.pieces):
            self._slices[piece.parameter] = piece.part
            piece.part.whole_dim = piece.parameter.dim()  # type: ignore[attr-defined]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        _refuse_unfrozen(self._frozen, "FSDP")
        self._sync.notice_the_step()
        args, kwargs = tree_map(self._cast, (args, kwargs))
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients of all ranks to a joint norm of at most `max_norm`; functions that clip a list of
        tensors see one rank alone. Return the norm before scaling, a float64 scalar. Collective.

        Raises:
            ValueError: `max_norm` is not positive.
        """
        gradients = present_gradients(self._slices.values())
        # float64, because a rank without elements does not know the others' dtype.
        norm = gradient_norm(gradients).to(self._sync.ranks.device, torch.float64)
        norm = norm_over_ranks(norm, self._sync._links.reductions)
        clip_for(None, gradients, norm, max_norm)
        return norm

    def _cast(self, value: Any) -> Any:
        is_wide = isinstance(value, torch.Tensor) and value.dtype == torch.float32
        return value.to(self._sync.compute_dtype) if is_wide and self._sync.compute_dtype else value

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's elements of every parameter that trains; of small ones it may have none."""
        for name, parameter in self.module.named_parameters(prefix=prefix):
            if parameter in self._slices:
                yield name, self._slices[parameter]


def gather_full_parameters(model: FSDP) -> dict[str, torch.Tensor]:
    """Return the whole parameters by name, on every rank, in the dtype that they had before. Collective."""
    return model._sync.whole_weights()


class _FinishedByThePass(Fsdp):
    """`fsdp` for any optimizer: the end of a backward pass puts the gradients into the slices' `grad`."""

    saves_everywhere = True

    def notice_the_step(self) -> None:
        """Free gathered weights, which the step may have made stale, and gradients that were set to None."""
        self.refresh()
        for flat in self._flats:
            for piece in flat.held() if flat.gradient is not None else ():
                if piece.part.grad is None:
                    flat.gradient[piece.in_shard] = 0  # type: ignore[index]

    def _end_pass(self) -> None:
        super()._end_pass()
        self.finish()
