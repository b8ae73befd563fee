"""For a training loop of your own, in the existing process group: `DataParallel`, `ShardedOptimizer` and `FSDP`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from lmkit.core.adamw import loss_of
from lmkit.core.buckets import MIB, on_gradient
from lmkit.core.step import clip_for, gradient_norm, has_slices
from lmkit.errors import UsageError
from lmkit.parallel.buckets import at_end_of_pass, runs_backward
from lmkit.parallel.collectives import Averager, Traffic, norm_over_ranks, sum_over_ranks
from lmkit.parallel.fsdp import FreedShards, Fsdp
from lmkit.parallel.gather import Gather, Links
from lmkit.parallel.ranks import Ranks
from lmkit.parallel.shards import Piece
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
        _refuse_slices("DataParallel", module.parameters())
        self._made_with = {"strategy": strategy, **options}
        table = {key: options.pop(key) for key in list(options) if key in ParallelConfig.model_fields}
        ranks = Ranks.current()
        self._sync = build_strategy(ParallelConfig(strategy=name, **table, options=options), ranks)
        self.module = module
        watched = module if ranks.world_size > 1 else nn.Module()
        self._watch = _Watch("DataParallel", watched.named_parameters(), watched)
        # Not a submodule: the strategy may wrap the module once more.
        self.__dict__["_call"] = self._sync.attach(module)
        self._is_finished = False  # whether the end of a backward pass has averaged the gradients
        self._is_running = False  # whether a backward pass runs that will average them
        self._ending: Callable[[], object] = lambda: None
        if ranks.world_size > 1:
            for parameter in trainable_parameters(module):
                on_gradient(parameter, self._on_gradient)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._watch.look()
        self._is_finished = False
        if self._is_running and not runs_backward():  # the last pass raised
            self._sync.reset()
            self._is_running = False
        return self._call(*args, **kwargs)  # type: ignore[operator]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return partial(DataParallel, **self._made_with), (self.module,), {"training": self.training}

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
        params: parameters, named parameters, or parameter groups.
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
        self._watches: list[_Watch] = []
        listed = list(params)
        groups = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
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
        for watch in self._watches:
            watch.look()
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
        listed: list[Any] = [given] if isinstance(given, torch.Tensor) else list(given)
        parameters = list(dict.fromkeys(x[1] if isinstance(x, tuple) else x for x in listed))
        _refuse_slices("ShardedOptimizer", parameters)
        if not {parameter for group in self._given for parameter in group}.isdisjoint(parameters):
            raise ValueError("a parameter is in more than one parameter group")
        number = len(self._given)
        self._given.append(parameters)
        names = {parameter: f"{number}.{index}" for index, parameter in enumerate(parameters)}
        planned = plan_shards([parameters], names, capacity=_BUCKET_BYTES, weights="fp32")
        buckets = [KeptShards(bucket, names, self._links) for _, bucket in planned]
        named = ((f"{name}, counted by group and position,", p) for p, name in names.items())
        self._watches.append(_Watch("ShardedOptimizer", named, memory=True))
        return buckets


class _Watch:
    """Refuse parameters that changed after they were wrapped: training would go wrong in silence.

    Args:
        owner: what wrapped them.
        named: the parameters.
        module: it must get no other parameters.
        memory: the parameters that train must keep their memory.
    """

    def __init__(self, owner: str, named: Iterable[Any], module: Any = None, memory: bool = False) -> None:
        self._owner, self._module = owner, module
        self._held = [(name, p, p.requires_grad, memory and p.data_ptr()) for name, p in named]
        self._known = {id(parameter) for _, parameter, *_ in self._held}

    @torch.compiler.disable
    def look(self) -> None:
        for name, parameter, trained, memory in self._held:
            if parameter.requires_grad and not trained:
                raise self.refusal("unfrozen", f"{name} was frozen at first, and requires gradients now")
            if trained and memory is not False and parameter.data_ptr() != memory:
                raise self.refusal("moved", f"{name} lies in other memory now (.to, .half, .data = ...)")
        if self._module is not None and not self._known.issuperset(map(id, self._module.parameters())):
            new = next(name for name, p in self._module.named_parameters() if id(p) not in self._known)
            raise self.refusal("replaced", f"{new} is another parameter now")

    def refusal(self, what: str, change: str) -> UsageError:
        hint = f"change the model first, then make {self._owner}"
        return UsageError(f"parallel.{what}", f"{self._owner}: {change}", hint=hint)


def _refuse_slices(owner: str, parameters: Iterable[torch.Tensor]) -> None:
    if has_slices(parameters):
        message = f"{owner}: FSDP has sharded some of the parameters"
        raise UsageError("parallel.sharded_twice", message, hint="use one FSDP(module, layers=...)")


def _take_own_gradients(bucket: KeptShards) -> None:
    """Take this rank's part of already averaged gradients; zeros for parameters without one."""
    bucket.gradient = torch.zeros_like(bucket.shard)
    for piece in bucket.held():
        if piece.parameter.grad is not None:
            bucket.gradient[piece.in_shard] = piece.parameter.grad.reshape(-1)[piece.own]


_BUCKET_BYTES = 50 * MIB
_NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon", "SparseAdam")


Layers = nn.Module | type[nn.Module] | Iterable[nn.Module | type[nn.Module]]


class FSDP(nn.Module):
    """Wrap a module so that every rank holds a share of its parameters, gradients and optimizer state.

        model = FSDP(model, compute_dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        loss_function(model(inputs), targets).backward()   # each rank with its own part of the batch
        model.clip_grad_norm_(1.0)
        optimizer.step()

    As with PyTorch's `fully_shard`, the module's parameters are this rank's elements, flat, except inside a call of
    the module, of a layer, or of a method through the wrapper (`model.loss(...)`). A backward pass adds the mean
    gradients of all ranks to theirs. The optimizer must update every element by itself. Every rank must call the same
    layers (see `Fsdp`) in the same order. A weight that is read without its layer's call stays gathered from then on.
    `state_dict`, also a submodule's, returns whole weights on the CPU, and every rank must call it; `load_state_dict`
    takes whole weights. Names begin with "module.", as those of `DataParallel`.

    Those of a matrix are flat, too: `p.dim() >= 2` is false for them. `lmkit.optim.decay_groups` gives matrices their
    weight decay; the attribute `whole_dim` of a parameter has the dimensions of the whole.

    A gradient that is not finite on one rank is so on all: `torch.amp.GradScaler` skips the same steps everywhere.

    Args:
        module: the same on every rank; all take rank 0's values. On "meta", layers are initialised one by one.
        compute_dtype: dtype to which gathered fp32 weights and inputs are cast; None: no cast.
        layers: modules inside `module`, or their classes, that are gathered one by one besides its children; one or
            several.
        reshard_after_forward: free a layer's weights between its forward and its backward pass.

    Raises:
        LmkitError: the modules differ between ranks.
        UsageError: none of the modules is one of `layers`.
    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        *,
        layers: Layers = (),
        reshard_after_forward: bool = True,
    ) -> None:
        super().__init__()
        _refuse_slices("FSDP", module.parameters())
        config = ParallelConfig(strategy="fsdp", options={"reshard_after_forward": reshard_after_forward})
        self._sync = _FinishedByThePass(Ranks.current(), config)
        self._sync.compute_dtype = compute_dtype
        self._sync.named_layers = _find_layers(module, layers)
        self._sync.attach(module)
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
        value = getattr(self.module, name)
        # A method of the module, or of a module inside that reaches through it, as PEFT's models do.
        is_method = isinstance(getattr(value, "__self__", None), nn.Module)
        return partial(self._sync.call, value) if is_method else value

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients of all ranks to a joint norm of at most `max_norm`. Return the norm before scaling, a
        float64 scalar. Collective. `torch.nn.utils.clip_grad_norm_` raises UsageError: it sees one rank alone.

        Raises:
            ValueError: `max_norm` is not positive.
        """
        gradients = [gradient.detach() for gradient in present_gradients(self.parameters())]
        # float64, because a rank without elements does not know the others' dtype.
        norm = gradient_norm(gradients).to(self._sync.ranks.device, torch.float64)
        norm = norm_over_ranks(norm, self._sync._links.reductions)
        clip_for(None, gradients, norm, max_norm)
        return norm

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's elements of every parameter; of small ones it may have none."""
        return self.module.named_parameters(*args, **kwargs)


def gather_full_parameters(model: FSDP) -> dict[str, torch.Tensor]:
    """Return the whole parameters by name, on every rank, in the dtype that they had before. Collective."""
    return model._sync.whole_weights()


def _find_layers(module: nn.Module, wanted: Layers) -> set[nn.Module]:
    found: set[nn.Module] = set()
    inside = list(module.modules())[1:]
    for layer in [wanted] if isinstance(wanted, type) or not isinstance(wanted, Iterable) else wanted:
        those = {m for m in inside if m is layer or (isinstance(layer, type) and isinstance(m, layer))}
        if not those:
            message = f"FSDP: layers: {layer!r:.80} is not inside {type(module).__name__}"
            raise UsageError("parallel.no_such_layer", message, hint="name modules inside, or their classes")
        found |= those
    return found


class _FinishedByThePass(Fsdp):
    """`fsdp` for any optimizer: the end of a backward pass puts the gradients into the slices' `grad`."""

    saves_everywhere = True
    _depth = 0  # calls that run, one inside the other
    _is_stale = False  # whether a call runs in which no layer ran yet
    _saves: nn.Module | None = None  # the module whose state_dict runs

    def attach(self, model: nn.Module, *, fingerprint: str = "") -> nn.Module:
        super().attach(model, fingerprint=fingerprint)
        self._heard: dict[nn.Module, None] = {}  # layers by their last calls, also of calls without gradients
        self._pieces = [(flat, piece) for flat in self._flats for piece in flat.pieces]
        places = {piece.parameter: (flat, piece.part) for flat, piece in self._pieces}
        parts = ((piece.name, piece.part) for _, piece in self._pieces)
        self.watch = _Watch("FSDP", parts, model, memory=True)
        for flat, piece in self._pieces:
            flat.gives_empty = True
            piece.part.whole_dim = piece.parameter.dim()  # type: ignore[attr-defined]
        for name, module in model.named_modules():
            module.__dict__["_parameters"] = _Sliced(
                module._parameters, name or type(module).__name__, self, places
            )
            module.register_state_dict_pre_hook(self._before_state_dict)
            if module is not model:
                module.register_state_dict_post_hook(partial(self._give_weights, f"{name}."))
        for module in (model, *self._flats_of):
            module.register_forward_pre_hook(self._before_call, with_kwargs=True, prepend=True)
            module.register_forward_hook(self._after_call, always_call=True)
        return model

    # Calls

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the model as the model itself is called."""
        self._enter()
        try:
            args, kwargs = tree_map(self._cast, (args, kwargs))
            return method(*args, **kwargs)
        finally:
            self._leave()

    def _enter(self) -> None:
        self._is_stale = self._is_stale or not (self._depth or runs_backward())
        self._depth += 1

    def _leave(self) -> None:
        self._depth = max(self._depth - 1, 0)
        self._is_stale = self._is_stale and self._depth > 0

    @torch.compiler.disable
    def _before_call(self, module: nn.Module, *given: Any) -> Any:
        self._enter()
        self._look()
        return tree_map(self._cast, given) if module is self._model else None

    @torch.compiler.disable
    def _after_call(self, *_: object) -> None:
        self._leave()

    def _cast(self, value: Any) -> Any:
        is_wide = isinstance(value, torch.Tensor) and value.dtype == torch.float32
        return value.to(self.compute_dtype) if is_wide and self.compute_dtype else value

    def _look(self) -> None:
        """Once in each call: free gathered weights, which the step may have made stale; refuse a changed module."""
        if self._is_stale:
            self._is_stale, self._saves = False, None
            self.watch.look()
            self.refresh()

    @torch.compiler.disable
    def reads_whole(self, flat: FreedShards) -> bool:
        """Return whether a call, or a checkpoint in a backward pass, reads the weights. Keep them if a call reads
        them without their layer's call."""
        if not self._depth:
            return flat.is_open and runs_backward()
        self._look()
        if not flat.is_open:
            flat.kept = True
            flat.open()
        return True

    def _before_state_dict(self, module: nn.Module, *_: object) -> None:
        self._saves = module if self._saves is None else self._saves

    def _give_weights(self, inside: str, module: nn.Module, *found: Any) -> None:
        if self._saves is module:  # a submodule's weights are given with those of the module that is saved
            self._saves = None
            super()._give_weights(inside, module, *found)

    # Passes

    @torch.compiler.disable
    def _before_forward(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if runs_backward():
            self._begin()  # before a reentrant checkpoint begins a pass inside this one
        else:
            self._heard.pop(layer, None)
            self._heard[layer] = None
        super()._before_forward(layer, args, kwargs)

    def _begin(self) -> None:
        if self._pass is not None:
            return
        super()._begin()
        if self._heard:
            self._order = self._order_after([*self._heard])
        for flat, piece in self._pieces:
            if flat.gradient is not None and not _is_given(flat, piece):  # set to None, or replaced
                flat.gradient[piece.in_shard] = 0

    def _before_backward(self, layer: nn.Module, call: int) -> None:
        _refuse_double_backward()
        super()._before_backward(layer, call)

    def _on_gradient(self, index: int) -> None:
        _refuse_double_backward()
        if self._pass in (None, torch._C._current_graph_task_id()):
            super()._on_gradient(index)
        else:  # of a reentrant checkpoint; others of this parameter may follow
            self._used.add(index)

    @torch.no_grad()
    def _end_pass(self) -> None:
        super()._end_pass()
        self._heard.clear()
        others = [
            (piece.part, None if _is_given(flat, piece) else piece.part.grad) for flat, piece in self._pieces
        ]
        self.finish()
        for part, other in others:
            if other is not None and part.grad is not other:  # of a penalty on the slices, say
                part.grad += other  # type: ignore[operator]
            if not part.requires_grad:  # frozen since it was wrapped
                part.grad = None
            if part.grad is not None and self.ranks.world_size > 1:
                part.grad = part.grad.as_subclass(_OneRanksGradient)
        self._spread_nonfinite()

    def _spread_nonfinite(self) -> None:
        """Make the first gradient of every rank NaN if any rank's gradient is not finite."""
        held = [flat.gradient for flat in self._flats if flat.gradient is not None]
        sums = (gradient.sum(dtype=torch.float32) for gradient in held)
        found = sum_over_ranks(sum(sums, torch.zeros((), device=self.ranks.device)) * 0, self.ranks)
        for gradient in present_gradients(piece.part for flat in self._flats for piece in flat.held())[:1]:
            gradient[:1] += found

    def reset(self) -> None:
        super().reset()
        self._heard.clear()


_NORMS = {torch.linalg.vector_norm, torch.linalg.norm, torch.norm, torch.Tensor.norm, torch._foreach_norm}


class _OneRanksGradient(torch.Tensor):
    """The gradient of a slice, which refuses its norm: the other ranks' elements would be missing in it."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _NORMS:
            message = "FSDP: this gradient is one rank's part, whose norm is not the gradient's"
            hint = "call clip_grad_norm_ of lmkit's FSDP module; detach() returns the part as a plain tensor"
            raise UsageError("parallel.norm_of_part", message, hint=hint)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs or {})


def _is_given(flat: FreedShards, piece: Piece) -> bool:
    """Return whether the slice's gradient is its part of the flat gradient."""
    mine, whole = piece.part.grad, flat.gradient
    place = None if whole is None else whole.data_ptr() + piece.in_shard.start * whole.itemsize
    return mine is not None and mine.data_ptr() == place


def _refuse_double_backward() -> None:
    if torch.is_grad_enabled():
        message = "FSDP: create_graph=True would need weights that this pass frees"
        raise UsageError("parallel.double_backward", message, hint="use DataParallel")


Places = Mapping[nn.Parameter, tuple[FreedShards, nn.Parameter]]


class _Sliced(dict[str, Any]):
    """The `_parameters` of a module under FSDP. Listed, and read outside of calls, they are this rank's slices.

    PyTorch reads `module.weight` from `_parameters` by `[]`, and lists parameters by `items`. The dict itself holds
    the whole parameters.
    """

    def __init__(self, given: Mapping[str, Any], name: str, sync: _FinishedByThePass, places: Places) -> None:
        super().__init__(given)
        self._name, self._sync = name, sync
        self._places = {key: places[whole] for key, whole in given.items() if whole is not None}

    def __getitem__(self, key: str) -> Any:
        whole = super().__getitem__(key)
        flat, part = self._places.get(key, (None, whole))
        # The compiler traces calls of open layers only, and must not meet what changes.
        if flat is None or flat.lent is not None or (torch.compiler.is_compiling() and flat.is_open):
            return whole
        return whole if self._sync.reads_whole(flat) else part

    def __setitem__(self, key: str, value: Any) -> None:
        flat, _ = self._places.get(key, (None, None))
        if flat is None or flat.lent is None or value is None:
            raise self._sync.watch.refusal("replaced", f"{self._name}.{key} is set to another parameter")
        with torch.no_grad():  # load_state_dict(assign=True)
            super().__getitem__(key).copy_(value)

    def items(self) -> Any:
        """Return the slices; while weights are loaded, the whole parameters."""
        slices = {key: part for key, (flat, part) in self._places.items() if flat.lent is None}
        return [(key, slices.get(key, whole)) for key, whole in super().items()]

    def __reduce_ex__(self, protocol: Any) -> Any:
        message = f"FSDP: {self._name} cannot be copied or pickled: other ranks hold parts of it"
        raise UsageError("parallel.not_copied", message, hint="copy or save its state_dict()")
