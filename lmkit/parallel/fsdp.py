"""`fsdp`: parameters, gradients and optimizer state sharded over the ranks (Rajbhandari et al. 2020, "ZeRO", stage 3;
Zhao et al. 2023, "PyTorch FSDP").

A layer's weights are gathered for its forward pass and again for its backward pass, while the layer before it
computes, and are freed afterwards. Every backward pass reduce-scatters a layer's gradients as soon as they are
complete.

Ranks may compute different gradients, in different orders. So gathers and reductions use two process groups, and the
order in each follows from the calls of the forward pass alone.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lmkit.core.buckets import on_gradient
from lmkit.core.step import clip_for, gradient_norm
from lmkit.errors import UsageError
from lmkit.model.memory import PEER_LAYER_BYTES
from lmkit.model.transformer import in_order_of_memory, parameter_names, plain_name
from lmkit.parallel.buckets import at_end_of_pass, in_each_pass, runs_backward
from lmkit.parallel.collectives import norm_over_ranks, reduce_dtype_for, unused_everywhere
from lmkit.parallel.gather import Links, link, reads_peers
from lmkit.parallel.ranks import Ranks
from lmkit.parallel.shards import FlatShards, ShardedState, forget_capture
from lmkit.parallel.strategy import MakeOptimizer, Strategy, forward_units
from lmkit.recipe.tables import ParallelConfig
from lmkit.registry import STRATEGIES

MOST_REDUCTIONS = 2
"""Reductions in flight at a time. Each holds a flat tensor of a layer's gradients."""


@STRATEGIES.register(
    "fsdp",
    order=8,
    gives_shards=True,
    uses=("reduce_dtype", "weights", "gather"),
    shards=("parameters", "gradients", "optimizer"),
    options={"reshard_after_forward": True, "state_dtype": "fp32", "shard_ranks": 0},
)
class Fsdp(Strategy):
    """Gather each layer's weights for its passes, scatter its gradients, update a shard.

    A layer is a child of the model, or a member of its lists of layers; its weights are gathered and freed together.
    Every rank must call the same layers in the same order, also without gradients. The model's own parameters stay
    gathered.

    A model on the device "meta" is initialised layer by layer, with the values of a whole model. `state_dict` is
    collective: on rank 0 it has the exact weights, in host memory; on other ranks it has their shapes.

    Options: `reshard_after_forward` frees a layer's weights after its forward pass; if false, they stay until its
    backward pass, which takes memory and saves a gather. `state_dtype` ("fp32" or "bf16") is the dtype of the shards,
    of their gradients and of the optimizer's state. `shard_ranks` consecutive ranks share one copy of the model
    (hybrid sharding); 0: all ranks share one. With the number of GPUs of a machine, machines exchange only the mean
    gradients of shards.

    Attributes:
        compute_dtype: dtype in which fp32 weights are gathered; None: that of `parallel.weights`.
        named_layers: modules that are layers, too, however deep they lie.
        saves_everywhere: whether `state_dict` has the weights on every rank.
    """

    compute_dtype: torch.dtype | None = None
    named_layers: Set[nn.Module] = frozenset()
    saves_everywhere = False

    def __init__(self, ranks: Ranks, config: ParallelConfig) -> None:
        super().__init__(ranks, config)
        options = {**STRATEGIES.facts("fsdp").options, **config.options}
        self._reshards = options["reshard_after_forward"]
        self._state_dtype = named = str(options["state_dtype"])
        if named not in ("fp32", "bf16"):
            raise _wrong(f'state_dtype: "{named}" is no dtype of the state', 'use "fp32" or "bf16"')
        count = int(options["shard_ranks"]) or ranks.world_size
        if not 0 < count <= ranks.world_size or ranks.world_size % count:
            hint = "use the number of GPUs of a machine, or 0 for all ranks"
            raise _wrong(f"shard_ranks: {count} does not divide {ranks.world_size} ranks", hint)
        self._links = Links(replace(ranks, rank=ranks.rank % count, world_size=count))
        self._flats: list[FreedShards] = []
        self._flats_of: dict[nn.Module, list[FreedShards]] = {}
        self._calls: list[nn.Module] = []  # layers in the order of this forward pass
        self._after: dict[nn.Module, nn.Module] = {}  # layer -> the layer called after it last time
        self._used = set[int]()  # positions of parameters with a gradient on this rank since `finish`
        self._reducing: list[FreedShards] = []
        self._order: list[FreedShards] = []  # the order of reductions
        self._pass: int | None = None

    def not_captured(self) -> str:
        if any(flat.kept for flat in self._flats):
            return "fsdp keeps weights that the model reads without a layer's call"
        return super().not_captured()

    # Shard the model

    def attach(self, model: nn.Module, *, fingerprint: str = "") -> nn.Module:
        is_on_meta = _is_on_meta(model)
        super().attach(model, fingerprint=fingerprint)
        if is_on_meta:
            leave_meta(model, self.ranks.device)
        layers = list(dict.fromkeys(forward_units(model, self.named_layers)))
        if self.ranks.world_size > 1:
            self._link(len(layers))
        self._shard(model, layers)
        if self._links.gathers is not None:
            self._links.gathers.reserve(max(flat.sent_bytes for flat in self._flats))
        for layer, flats in (
            self._flats_of.items() if is_on_meta else [(None, [flat]) for flat in self._flats]
        ):
            for flat in flats:
                flat.lend()
            if layer is not None:
                draw(layer)
            for flat in flats:
                flat.take_back(of_first=True)
        self._hook_into(model)
        self.refresh()
        return model

    def _of_first(self, model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
        return () if _is_on_meta(model) else model.named_buffers()

    def _link(self, num_layers: int) -> None:
        within, weights = self._links.ranks, self.config.weights
        parameters = list(self._model.parameters())
        size = sum(p.numel() * reduce_dtype_for(p.dtype, weights).itemsize for p in parameters)
        may = within.world_size == self.ranks.world_size and size <= PEER_LAYER_BYTES * num_layers
        reads = may and reads_peers(parameters, self.ranks, self.config)
        self.gather = "reads peers" if reads else "collective"
        self._links = link(self.ranks, within, self.traffic, reads_peers=reads)

    def _shard(self, model: nn.Module, layers: list[nn.Module]) -> None:
        owners: dict[nn.Parameter, list[nn.Module]] = {p: [] for p in model.parameters()}
        for layer in layers:
            for parameter in layer.parameters():
                owners[parameter].append(layer)
        together: dict[tuple, list[nn.Parameter]] = {}
        for parameter, of in owners.items():
            key = (*of, parameter.dtype, parameter.device, parameter.requires_grad)
            together.setdefault(key, []).append(parameter)
        names = parameter_names(model)
        for group in together.values():
            dtype, layers_of = group[0].dtype, owners[group[0]]
            compute_dtype = reduce_dtype_for(dtype, self.config.weights)
            if dtype == torch.float32 and self.compute_dtype is not None:
                compute_dtype = self.compute_dtype
            flat = FreedShards(
                *(in_order_of_memory(group, model), names, self._links),
                weight_dtype=compute_dtype,
                state_dtype=reduce_dtype_for(dtype, self._state_dtype),
                reduce_dtype=reduce_dtype_for(compute_dtype, self.config.reduce_dtype),
            )
            flat.kept = not layers_of
            self._flats.append(flat)
            for layer in layers_of:
                self._flats_of.setdefault(layer, []).append(flat)
        for flat in self._flats:
            flat.make_shard()
        self._flats_of = {layer: self._flats_of[layer] for layer in layers if layer in self._flats_of}
        self._shared = {flat for flat in self._flats if len(owners[flat.parameters[0]]) > 1}
        self._after = dict(itertools.pairwise(self._flats_of))
        flat_of = {parameter: flat for flat in self._flats for parameter in flat.parameters}
        self._flat_at = [flat_of[parameter] for parameter in self.parameters]

    def _hook_into(self, model: nn.Module) -> None:
        for layer in self._flats_of:
            layer.register_forward_pre_hook(self._before_forward, with_kwargs=True)
            layer.register_forward_hook(self._after_forward)
        kept = [flat for flat in self._flats if flat.kept]
        for module, flats in (*self._flats_of.items(), (model, kept)):
            for flat in flats:
                module.register_load_state_dict_pre_hook(lambda *_, flat=flat: flat.lend(flat.gather_state()))
                module.register_load_state_dict_post_hook(lambda *_, flat=flat: flat.take_back())
        model.register_load_state_dict_post_hook(lambda *_: self.refresh())
        model.register_state_dict_post_hook(partial(self._give_weights, ""))
        for index, parameter in enumerate(self.parameters):
            on_gradient(parameter, self._on_gradient, index)

    # Reading weights without a layer's call

    def refresh(self) -> None:
        """Free weights that were gathered before the shards changed; gather again those that stay. Collective."""
        for flat in self._flats:
            flat.spread()

    def wait_for_weights(self) -> None:
        """Gather all weights. Each stays until a layer uses it, or until the optimizer's next step."""
        for flat in self._flats:
            flat.open()

    def whole_weights(self, device: torch.device | str | None = None) -> dict[str, torch.Tensor]:
        """Return the exact weights, on the shards' or another device, by all their names in checkpoints.
        Collective."""
        weights: dict[str, torch.Tensor] = {}
        for flat in self._flats:
            weights |= flat.named(flat.gather_state().to(device or flat.shard.device))
        names = parameter_names(self._model)
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            weights[plain_name(name)] = weights[names[parameter]]
        return weights

    def weights_to_save(self) -> dict[str, torch.Tensor]:
        weights: dict[str, torch.Tensor] = {}
        sizes = [0] * self.ranks.world_size
        for flat in self._flats:
            owner = sizes.index(min(sizes))
            sizes[owner] += flat.shard_size
            whole = flat.gather_state()
            if owner == self.ranks.rank:
                weights |= flat.named(whole.to("cpu"))
        return weights

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> bool:
        self._sharded.load_masters(weights)
        return True

    def _give_weights(
        self, inside: str, module: nn.Module, state_dict: dict[str, Any], prefix: str, _: object
    ) -> None:
        """Complete the state dict of the model, or of its module whose names begin with `inside`. Collective."""
        weights = self.whole_weights("cpu" if self.ranks.is_first or self.saves_everywhere else "meta")
        for name in state_dict:
            if (
                name.startswith(prefix)
                and (plain := plain_name(inside + name.removeprefix(prefix))) in weights
            ):
                state_dict[name] = weights[plain]

    def _hide_all(self) -> None:
        for flat in self._flats:
            flat.hide()

    # Forward. A compiled layer runs these hooks around its graph, not in it.

    @torch.compiler.disable
    def _before_forward(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        flats, recomputes = self._flats_of[layer], runs_backward()
        if not recomputes and self._pass is not None:
            self.reset()  # the last backward pass raised
        for flat in flats:
            flat.start()
        for flat in flats:
            flat.open()
        if recomputes:
            return
        if layer in self._after:
            for flat in self._flats_of[self._after[layer]]:
                flat.start()
        if inputs := _differentiable((args, kwargs)):
            in_each_pass(inputs, len(inputs), partial(self._after_backward, layer))

    @torch.compiler.disable
    def _after_forward(self, layer: nn.Module, args: tuple, output: Any) -> None:
        if runs_backward():  # checkpointing computes the layer again
            return
        stays = False
        if outputs := _differentiable(output):
            # The last layer's backward pass comes first, so its weights stay.
            stays = not self._reshards or layer not in self._after
            in_each_pass(outputs, 1, partial(self._before_backward, layer, len(self._calls)))
            self._calls.append(layer)
        for flat in self._flats_of[layer] if not stays else ():
            flat.hide()

    # Backward

    def _begin(self) -> None:
        if self._pass is not None:
            return
        self._pass = torch._C._current_graph_task_id()
        self._cursor = len(self._calls)
        self._gathered: set[FreedShards] = set()
        self._arrived: Counter[FreedShards] = Counter()
        self._next = 0
        if self._calls or not self._order:  # else a graph is passed once more
            self._order = self._order_after(self._calls)
        at_end_of_pass(self._end_pass)

    def _order_after(self, calls: list[nn.Module]) -> list[FreedShards]:
        called = [flat for layer in reversed(calls) for flat in self._flats_of[layer]]
        kept = [flat for flat in self._flats if flat.kept]
        return [flat for flat in dict.fromkeys([*called, *kept]) if flat.trains]

    def _before_backward(self, layer: nn.Module, call: int) -> None:
        self._begin()
        self._gather_back_to(call)
        for flat in self._flats_of[layer]:
            flat.open()
        self._gather_back_to(call - 1)

    def _gather_back_to(self, call: int) -> None:
        """Start gathering what the backward pass needs up to a call, in the reverse order of the calls."""
        while self._cursor > max(call, 0):
            self._cursor -= 1
            for flat in self._flats_of[self._calls[self._cursor]]:
                if flat not in self._gathered:
                    self._gathered.add(flat)
                    flat.start()

    def _after_backward(self, layer: nn.Module) -> None:
        """Free frozen weights, too. Trained weights are freed when their gradients are reduced."""
        flats = self._flats_of[layer]
        is_complete = all(self._arrived[flat] == len(flat.parameters) for flat in flats if flat.trains)
        if is_complete and self._calls.count(layer) == 1:
            for flat in flats:
                if flat not in self._shared:
                    flat.hide()

    def _on_gradient(self, index: int) -> None:
        self._begin()
        self._used.add(index)
        flat = self._flat_at[index]
        self._arrived[flat] += 1
        if self._arrived[flat] == len(flat.parameters):
            self._reduce_while(lambda flat: self._arrived[flat] == len(flat.parameters))

    def _reduce_while(self, is_ready: Callable[[FreedShards], bool]) -> None:
        while self._next < len(self._order) and is_ready(self._order[self._next]):
            flat = self._order[self._next]
            self._next += 1
            while len(self._reducing) >= MOST_REDUCTIONS:
                self._reducing.pop(0).wait_reduced()
            flat.reduce()
            if self._reducing:
                self._reducing[-1].replicate()
            self._reducing.append(flat)
            flat.hide()

    def _end_pass(self) -> None:
        """Make the collectives that other ranks' passes may have made, then free all weights."""
        self._gather_back_to(0)
        self._reduce_while(lambda flat: True)
        self._hide_all()
        if self._calls:
            self._after = dict(itertools.pairwise(self._calls))
        self._calls.clear()
        self._pass = None

    # The step

    def build_optimizer(self, make: MakeOptimizer, groups: Iterable[dict[str, Any]]) -> ShardedState:
        self._sharded = ShardedState(make, groups, self._flats, self._links.ranks)
        return self._sharded

    @torch.no_grad()
    def finish(self, *, wait: bool = True) -> None:
        """Wait for the gradients. They are in the optimizer's slices, not in `parameter.grad`."""
        for flat in self._reducing:
            flat.wait_reduced()
        self._reducing.clear()
        unused = [index for index in range(len(self.parameters)) if index not in self._used]
        unused = unused_everywhere(unused, len(self.parameters), self.ranks, self.traffic)
        nowhere = {self.parameters[index] for index in unused}
        self._used.clear()
        for flat in self._flats:
            flat.give_gradients(nowhere)

    @torch.no_grad()
    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        gradients = [flat.gradient for flat in self._flats if flat.gradient is not None]
        mine = gradient_norm(gradients).to(self.ranks.device)
        norm = norm_over_ranks(mine, self._links.reductions)
        clip_for(self._sharded.inner, gradients, norm, max_norm)
        return norm

    def end_step(self) -> None:
        """Free also what was gathered for no step: a graph that is replayed would change the shards unnoticed."""
        self._hide_all()
        if self._links.gathers is not None:
            self._links.gathers.end_step()

    def reset(self) -> None:
        forget_capture(self._flats, self.ranks.device)
        for flat in self._flats:
            flat.drop_reduced()
        self._hide_all()
        for parameter in self.parameters:
            parameter.grad = None
        self._reducing.clear()
        self._used.clear()
        self._calls.clear()
        self._pass = None


def _wrong(option: str, hint: str) -> UsageError:
    return UsageError("parallel.wrong_option", f"parallel.options.{option}", hint=hint)


def _is_on_meta(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def _differentiable(values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested tuples, lists and dicts that need a gradient; [] if autograd is off."""
    found: list[torch.Tensor] = []
    left = [values] if torch.is_grad_enabled() else []
    while left:
        value = left.pop()
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                found.append(value)
        elif isinstance(value, (tuple, list)):
            left += value
        elif isinstance(value, dict):
            left += value.values()
    return found


class FreedShards(FlatShards):
    """Parameters whose whole weights are gathered for a layer's passes, and freed.

    While the weights are not gathered, every parameter is one NaN, expanded to its shape. Gathered weights always lie
    in the same storage, which is emptied and filled again. So tensors and views that autograd saved in the forward
    pass read the weights that are gathered for the backward pass.

    Attributes:
        trains: whether the parameters require gradients: all do, or none.
        kept: keep the weights gathered, because they are read without a layer's call.
        is_open: whether the parameters are the gathered weights.
        lent: the tensor that `lend` showed, or None.
    """

    kept = False

    def __init__(self, *given: Any, **dtypes: Any) -> None:
        super().__init__(*given, **dtypes)
        self.trains = self.parameters[0].requires_grad
        self._weights = torch.empty(self.size, dtype=self._weight_dtype, device=self._device)
        self._bytes = self._weights.nbytes
        self._views = self._parts(self._weights)
        self._weights.untyped_storage().resize_(0)
        self._absent = [absent(p.shape, self._weight_dtype, self._device) for p in self.parameters]
        self._is_gathered = self.is_open = False
        self._is_replicating = False
        self.lent: torch.Tensor | None = None

    def make_shard(self) -> None:
        """Allocate the shard, as zeros. Call it after all flat tensors were made: each is whole for a moment."""
        self.shard = torch.zeros(self.shard_size, dtype=self.gradient_dtype, device=self._device)
        self.cut_shard()

    # Weights

    @property
    def sent_bytes(self) -> int:
        """Bytes of the shard in the dtype in which it is gathered."""
        return self.shard_size * self._weights.itemsize

    def start(self) -> None:
        """Start gathering the weights, unless they are gathered or in flight. Collective."""
        if self._is_gathered:
            return
        self._is_gathered = True
        self._weights.untyped_storage().resize_(self._bytes)
        if self.links.gathers is None:
            self._weights.copy_(self.shard)
        else:
            self._arriving = self.links.gathers.start(self._weights, self.shard)

    def open(self) -> None:
        """Start gathering, wait (on GPUs the current stream waits), and point the parameters at the weights."""
        self.start()
        self.wait_gathered()
        if not self.is_open:
            self._show(self._views)
            self.is_open = True

    def hide(self) -> None:
        """Free the gathered weights, unless they are kept."""
        if not self.kept:
            self._free()

    def _free(self) -> None:
        if not self._is_gathered:
            return
        self.wait_gathered()
        self._show(self._absent)
        self._is_gathered = self.is_open = False
        self._weights.untyped_storage().resize_(0)

    def spread(self) -> None:
        self._free()
        if self.kept:
            self.open()

    @torch.no_grad()
    def lend(self, whole: torch.Tensor | None = None) -> None:
        """Make the parameters views of `whole`, a result of `gather_state`, until `take_back`; None: of a new tensor
        with their present values."""
        if whole is None:
            whole = torch.zeros(self.size, dtype=self._given_dtype, device=self.shard.device)
            torch._foreach_copy_(self._parts(whole), [p.detach() for p in self.parameters])
        self._free()
        self._show(self._parts(whole))
        self.lent = whole

    @torch.no_grad()
    def take_back(self, *, of_first: bool = False) -> None:
        """Copy this rank's shard out of what `lend` showed; `of_first`: with rank 0's values, collectively."""
        assert self.lent is not None
        if of_first and self.links.gathers is not None:
            dist.broadcast(self.lent.view(torch.uint8), src=0)  # backends do not know every dtype
        self.shard.copy_(self.links.ranks.own_part(self.lent))
        self.lent = None
        self._show(self._absent)

    # Gradients

    def reduce(self) -> None:
        super().reduce()
        self._is_replicating = False

    def replicate(self) -> None:
        """Start averaging the mean in flight over the replicas, if there are any. Collective."""
        if self._pending is not None and self.links.replicas is not None and not self._is_replicating:
            self._is_replicating = True
            self._pending = self.links.replicas.all_reduce(self._pending.wait())

    def wait_reduced(self) -> None:
        self.replicate()
        super().wait_reduced()


def absent(shape: torch.Size, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Return a NaN in the given shape. It takes the memory of one element and cannot be written to."""
    return torch.full((), math.nan, dtype=dtype, device=device).expand(shape)


def leave_meta(model: nn.Module, device: torch.device) -> None:
    """Move parameters and buffers from "meta" to `device`, without memory or values; ties stay."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model._apply(lambda tensor: absent(tensor.shape, tensor.dtype, device))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def draw(module: nn.Module) -> None:
    """Draw initial values of a module's parameters, in the order of its constructor."""
    for part in module.modules():
        reset = getattr(part, "reset_parameters", None)
        if reset is not None:
            reset()
    for name, parameter in module.named_parameters():
        if parameter.detach().sum().isnan():  # without a mask as long as the parameter
            owner = type(module).__name__
            raise ValueError(f'{name} of {owner} is on "meta", and no reset_parameters draws it')
