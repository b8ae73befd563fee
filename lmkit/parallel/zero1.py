"""`zero1`: optimizer state sharded over the ranks (Rajbhandari et al. 2020, "ZeRO", stage 1; P_os).

The backward pass reduce-scatters the gradients of each bucket. Every rank updates its shard, 1/W of all elements.
The weights are gathered while the next forward pass runs. With bf16 weights a parameter costs 2 + 2 bytes of
communication instead of 8.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn

from lmkit.core.buckets import MIB, fill_buckets
from lmkit.core.step import clip_for, gradient_norm
from lmkit.model.transformer import in_order_of_memory, parameter_names
from lmkit.optim.adamw import AdamW
from lmkit.parallel.buckets import WatchedBuckets
from lmkit.parallel.collectives import norm_over_ranks, reduce_dtype_for, unused_everywhere
from lmkit.parallel.gather import Gather, Links, PeerGather, aligned, reads_peers
from lmkit.parallel.ranks import Ranks
from lmkit.parallel.shards import FlatShards, ShardedState, forget_capture, shard_size_of
from lmkit.parallel.strategy import MakeOptimizer, Strategy, forward_units
from lmkit.recipe.tables import ParallelConfig
from lmkit.registry import STRATEGIES


@STRATEGIES.register(
    "zero1",
    order=7,
    aliases=("sharded_optimizer",),
    uses=("bucket_mb", "reduce_dtype", "weights", "gather"),
    shards=("optimizer",),
    packs="bucket",
    gives_shards=True,
)
class Zero1(Strategy):
    """Reduce-scatter gradients, update a shard, gather the weights.

    `build_optimizer` moves the parameters into flat buckets. Call it after the model is on its device and before the
    first forward pass. `weights="bf16"` casts fp32 parameters; a group's key "weights" overrides it. Parameters in no
    group do not change. A parameter that no rank used keeps its value and state.

    A layer waits for its buckets right before it runs. The step itself waits for weights that are read without a call
    of their layer: the model's own parameters, and those of a layer that the last forward pass did not call (a fused
    loss may read its weight). Passes without gradients, `state_dict` and `load_state_dict` wait for all buckets.
    """

    buckets: ScatteredBuckets

    def __init__(self, ranks: Ranks, config: ParallelConfig) -> None:
        super().__init__(ranks, config)
        self._flats: list[KeptShards] = []
        self._called: set[nn.Module] = set()  # layers, since the last step

    @torch.no_grad()
    def build_optimizer(self, make: MakeOptimizer, groups: Iterable[dict[str, Any]]) -> Zero1Optimizer:
        given = [{**group, "params": list(group["params"])} for group in groups]
        weights = [group.pop("weights", self.config.weights) for group in given]
        names = parameter_names(self._model)
        of_groups = [group["params"] for group in given]
        capacity = int(self.config.bucket_mb * MIB)
        planned = [
            (in_order_of_memory(bucket, self._model), reduce_dtype_for(bucket[0].dtype, weights[group]))
            for group, bucket in plan_shards(of_groups, names, capacity=capacity, weights=self.config.weights)
        ]
        self._links = self._link(planned)
        self._flats = []
        for bucket, dtype in planned:
            reduced = reduce_dtype_for(dtype, self.config.reduce_dtype)
            flat = KeptShards(bucket, names, self._links, weight_dtype=dtype, reduce_dtype=reduced)
            self._flats.append(flat)
        self.buckets = ScatteredBuckets(self._flats)
        self._index_of = {parameter: index for index, parameter in enumerate(self.buckets.parameters)}
        self._wait_in(self._model)
        self._sharded = Zero1Optimizer(make, given, self._flats, self.ranks)
        self._sharded.register_step_post_hook(lambda *_: self._after_step())
        return self._sharded

    def _link(self, planned: Sequence[tuple[list[nn.Parameter], torch.dtype]]) -> Links:
        world_size = self.ranks.world_size
        if world_size == 1:
            return Links(self.ranks)
        gathers = Gather(self._averager)
        self.gather = "collective"
        if reads_peers((parameter for bucket, _ in planned for parameter in bucket), self.ranks, self.config):
            sizes = [world_size * shard_size_of(sum(p.numel() for p in ps), world_size) for ps, _ in planned]
            num_bytes = sum(aligned(n * dtype.itemsize) for n, (_, dtype) in zip(sizes, planned, strict=True))
            gathers = PeerGather(self._averager, num_bytes)
            self.gather = "reads peers"
        return Links(self.ranks, gathers, self._averager)

    def _wait_in(self, model: nn.Module) -> None:
        """Install the hooks that wait for weights."""
        bucket_of = {parameter: bucket for bucket in self._flats for parameter in bucket.parameters}
        self._needs: dict[nn.Module, list[KeptShards]] = {}
        in_layers: set[nn.Parameter] = set()
        for layer in forward_units(model):
            in_layers.update(layer.parameters())
            if needed := list(dict.fromkeys(bucket_of[p] for p in layer.parameters() if p in bucket_of)):
                self._needs[layer] = needed
                layer.register_forward_pre_hook(self._before_call)
        self._outside_layers = {bucket for p, bucket in bucket_of.items() if p not in in_layers}
        model.register_state_dict_pre_hook(lambda *_: self.wait_for_weights())
        # Weights that arrive after loading would overwrite the loaded ones.
        model.register_load_state_dict_pre_hook(lambda *_: self.wait_for_weights())
        model.register_load_state_dict_post_hook(lambda *_: self._take_loaded())

    @torch.compiler.disable  # a compiled layer runs this in front of its graph, not in it
    def _before_call(self, layer: nn.Module, inputs: Any) -> None:
        if not torch.is_grad_enabled():
            self.wait_for_weights()
            return
        self._called.add(layer)
        for bucket in self._needs[layer]:
            bucket.wait_gathered()

    def _after_step(self) -> None:
        """Wait for the weights for which no layer's call waits. Called when gathering has started."""
        not_called = [needed for layer, needed in self._needs.items() if layer not in self._called]
        now = self._outside_layers.union(*not_called)
        for bucket in self._flats:
            if bucket in now:
                bucket.wait_gathered()
        self._called.clear()

    @torch.no_grad()
    def _take_loaded(self) -> None:
        for bucket in self._flats:
            bucket.shard.copy_(bucket.own_weights)

    @torch.no_grad()
    def finish(self, *, wait: bool = True) -> None:
        """Reduce the gradients into the optimizer's shards. They are not in `parameter.grad`."""
        unused = [self._index_of[parameter] for parameter in self.buckets.without_gradient()]
        self.buckets.launch_rest()
        parameters = self.buckets.parameters
        unused = unused_everywhere(unused, len(parameters), self.ranks, self.traffic)
        self._sharded.unused = {parameters[index] for index in unused}
        for bucket in self._flats if wait else ():
            bucket.wait_reduced()
            bucket.give_gradients(self._sharded.unused)

    @torch.no_grad()
    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        norms, shards = [], []
        for buckets in (self._flats[:-1], self._flats[-1:]):
            for bucket in buckets:
                bucket.wait_reduced()  # the last bucket is reduced while the norm of the others is computed
            if gradients := [b.gradient for b in buckets if b.gradient is not None]:
                shards += gradients
                norms.append(gradient_norm(gradients))
        norm = norm_over_ranks(torch.linalg.vector_norm(torch.stack(norms)), self._links.reductions)
        clip_for(self._sharded.inner, shards, norm, max_norm)
        return norm

    def wait_for_weights(self) -> None:
        for bucket in self._flats:
            bucket.wait_gathered()

    end_step = wait_for_weights

    def reset(self) -> None:
        forget_capture(self._flats, self.ranks.device)
        if self.buckets is not None:  # the optimizer is built
            self.buckets.reset()


class ScatteredBuckets(WatchedBuckets):
    """Buckets that are reduced to shards. They are planned before the first pass."""

    def __init__(self, sharded: Sequence[KeptShards]) -> None:
        super().__init__(parameter for bucket in sharded for parameter in bucket.parameters)
        self._sharded = sharded
        self._use([bucket.parameters for bucket in sharded])
        self._start_over()

    def plan(self, in_ready_order: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        return self.buckets

    def launch(self, index: int) -> None:
        self._sharded[index].reduce()

    def abandon(self) -> None:
        for bucket in self._sharded:
            bucket.drop_reduced()


STEP_PARTS = 2
"""Parts of a step: gathering the weights of one part overlaps the arithmetic of the next."""


def plan_shards(
    groups: Sequence[Sequence[nn.Parameter]],
    names: Mapping[nn.Parameter, str],
    *,
    capacity: int,
    weights: str,
) -> list[tuple[int, list[nn.Parameter]]]:
    """Assign the parameters of each group that need gradients to buckets; return (index of the group, parameters) of
    each, in the order of launching.

    Args:
        names: every parameter's name (see `parameter_names`), in the order of the forward pass: the last parameter
            becomes ready first.
        capacity: bytes of a bucket, counted in the dtype of `weights`.
    """

    def bytes_of(parameter: nn.Parameter) -> int:
        return parameter.numel() * reduce_dtype_for(parameter.dtype, weights).itemsize

    position = {parameter: index for index, parameter in enumerate(names)}
    planned: list[tuple[int, list[nn.Parameter]]] = []
    for index, group in enumerate(groups):
        trainable = [parameter for parameter in group if parameter.requires_grad]
        in_ready_order = sorted(trainable, key=lambda parameter: -position[parameter])
        for bucket in fill_buckets(in_ready_order, capacity, bytes_of):
            *others, last = bucket
            if others and bytes_of(last) >= capacity:
                planned.append((index, others))
                bucket = [last]  # a parameter that fills a bucket alone (an embedding) needs no packing
            planned.append((index, bucket))
    # A bucket is complete when the gradients of its first layer are ready.
    return sorted(planned, key=lambda item: -min(position[parameter] for parameter in item[1]))


class KeptShards(FlatShards):
    """Parameters whose whole weights every rank keeps: they become views of the flat tensor.

    Attributes:
        weights: the parameters' storage, (size,).
        own_weights: this rank's part of `weights`; `shard` itself, unless the weights were cast to another dtype.
    """

    _copies_mean = False

    def __init__(self, *given: Any, **dtypes: Any) -> None:
        super().__init__(*given, **dtypes)
        dtype, device = self._given_dtype, self._device
        allocate = torch.zeros if self.links.gathers is None else self.links.gathers.allocate
        self.weights = allocate(self.size, dtype=self._weight_dtype, device=device)
        self.saves_masters = self._weight_dtype != dtype
        whole = torch.zeros(self.size, dtype=dtype, device=device) if self.saves_masters else self.weights
        torch._foreach_copy_(self._parts(whole), [p.detach() for p in self.parameters])
        if self.saves_masters:
            self.weights.copy_(whole)
        self._show(self._parts(self.weights))
        self.own_weights = self.links.ranks.own_part(self.weights)
        self.shard = self.links.ranks.own_part(whole).clone() if self.saves_masters else self.own_weights
        self.cut_shard()

    def keep_reduce_dtype(self) -> None:
        """Do not cast gradients: the optimizer reads them in the reduced dtype and writes `own_weights` itself."""
        self.gradient_dtype = self._reduce_dtype
        for piece in self.pieces:
            piece.part.grad_dtype = None  # any

    def reduce(self) -> None:
        self.wait_gathered()  # returns at once if a layer that ran has read these weights
        super().reduce()

    def spread(self) -> None:
        self.own_weights.copy_(self.shard)
        start_gather([self])
        self.wait_gathered()


def start_gather(buckets: Sequence[KeptShards]) -> None:
    """Start collecting the other ranks' shards of the buckets' weights."""
    if buckets and (gathers := buckets[0].links.gathers) is not None:
        arrivals = gathers.refill([bucket.weights for bucket in buckets])
        for bucket, arriving in zip(buckets, arrivals, strict=True):
            bucket._arriving = arriving


class Zero1Optimizer(ShardedState):
    """Update this rank's shards of all buckets, in the order of their reductions, and start gathering the weights.

    Our AdamW reads gradients in the dtype in which they were reduced, and writes shards and weights together.

    Attributes:
        unused: parameters that no rank used; the next step does not change them.
    """

    _flats: list[KeptShards]  # type: ignore[assignment]
    unused: Set[nn.Parameter] = frozenset()

    def _own(self, flats: Sequence[FlatShards]) -> None:
        super()._own(flats)
        # In the order of the next forward pass
        self._step_parts = _split_evenly(self._flats[::-1], STEP_PARTS)
        if isinstance(self.inner, AdamW) and self.inner.writes_copies:
            for bucket in self._flats:
                bucket.keep_reduce_dtype()
                for piece in bucket.held() if bucket.saves_masters else ():
                    self.inner.copies[piece.part] = bucket.own_weights[piece.in_shard]

    def _step(self) -> None:
        writes_weights = getattr(self.inner, "writes_copies", False)
        for bucket in self._flats:
            bucket.withhold_gradients()
        for part in self._step_parts:
            for bucket in part:
                bucket.wait_reduced()
                bucket.give_gradients(self.unused)
            self.inner.step()
            for bucket in part:
                bucket.drop_reduced()
                if not writes_weights:
                    bucket.own_weights.copy_(bucket.shard)
            start_gather(part)
        self.unused = frozenset()


def _split_evenly(buckets: Sequence[KeptShards], parts: int) -> list[list[KeptShards]]:
    """Split into consecutive runs with about equal numbers of elements."""
    total = sum(bucket.shard_size for bucket in buckets)
    runs: list[list[KeptShards]] = [[] for _ in range(parts)]
    before = 0
    for bucket in buckets:
        runs[min(parts - 1, before * parts // total)].append(bucket)
        before += bucket.shard_size
    return [run for run in runs if run]
