"""`zero1`: optimizer state sharded over the ranks (Rajbhandari et al. 2020, "ZeRO", stage 1; P_os).

A bucket's gradients are reduce-scattered while the backward pass goes on; every rank steps its shard, exactly
1/W of all elements (plus padding), and the weights are gathered behind the next forward pass, each waited for
where it is first read. With bf16 weights a parameter costs 2 + 2 bytes on the wire instead of 8.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lmkit.model.transformer import plain_name
from lmkit.optim.clipping import clip_for
from lmkit.parallel.accumulation import Accumulates
from lmkit.parallel.bucketed import MIB, bytes_of, fill_buckets
from lmkit.parallel.gradient_watch import GradientWatch, order_of_first_rank
from lmkit.parallel.lazy_weights import LazyWeights
from lmkit.parallel.peer_memory import PeerMemory, can_share_memory
from lmkit.parallel.process_group import Ranks
from lmkit.parallel.reduction import Averager, wire_dtype_for
from lmkit.parallel.replicas import broadcast_model, check_same_model
from lmkit.parallel.sharded_bucket import ShardedBucket
from lmkit.parallel.sharded_optimizer import ShardedOptimizer
from lmkit.parallel.strategies import MakeOptimizer, SyncOptions
from lmkit.parallel.traffic import Traffic
from lmkit.parallel.unused import UsedAnywhere
from lmkit.parallel.weight_gather import CollectiveGather, PeerGather, WeightGather, aligned
from lmkit.parallel.zero1_layout import BucketLayout, ShardLayout, shard_size_of
from lmkit.registry import STRATEGIES


@STRATEGIES.register(
    "zero1",
    order=7,
    aliases=("sharded_optimizer",),
    uses=("bucket_mb", "wire_dtype", "weights", "gather"),
    shards=("optimizer",),
)
class Zero1(Accumulates):
    """Heeds `bucket_mb`, `wire_dtype` (gradients of fp32 weights), `weights` and `gather`.

    `build_optimizer` moves the parameters into flat buckets and, with `weights="bf16"`, casts fp32 parameters:
    call it after the model is on its device and before the first forward pass. Parameters in no group are left
    alone. A parameter used on no rank keeps its value and state, but shares its bucket's step counter.
    """

    def __init__(self, ranks: Ranks, options: SyncOptions) -> None:
        self.ranks = ranks
        self.options = options
        self.traffic = Traffic()
        self._averager: Averager | None = None
        self._buckets: list[ShardedBucket] = []
        self._optimizer: ShardedOptimizer | None = None
        self._lazy: LazyWeights | None = None
        self._order_is_settled = False
        self.reads_peers = False
        """Whether weights are gathered by reading the other GPUs' memory; known once there is an optimizer."""

    def attach(self, model: nn.Module, *, fingerprint: str = "") -> nn.Module:
        if self.ranks.world_size > 1:
            check_same_model(model, self.ranks, fingerprint)
            broadcast_model(model)
            self._averager = Averager(self.ranks, self.traffic)
        self._model = model
        return model

    @torch.no_grad()
    def build_optimizer(self, make: MakeOptimizer, groups: Iterable[dict[str, Any]]) -> ShardedOptimizer:
        given = [{**group, "params": list(group["params"])} for group in groups]
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        position = {parameter: number for number, parameter in enumerate(names)}
        planned = [
            (number, parameters)
            for number, group in enumerate(given)
            for parameters in self._plan([p for p in group["params"] if p.requires_grad], position)
        ]
        # Launched in the order in which they become complete: when their first layer's gradients are there.
        planned.sort(key=lambda item: -min(position[parameter] for parameter in item[1]))
        buckets = []
        for number, parameters in planned:
            sizes = tuple(parameter.numel() for parameter in parameters)
            shard_size = shard_size_of(sum(sizes), self.ranks.world_size)
            layout = BucketLayout(number, tuple(plain_name(names[p]) for p in parameters), sizes, shard_size)
            buckets.append((parameters, layout))
        gather = self._make_gather(buckets)
        self._buckets = [self._make_bucket(parameters, layout, gather) for parameters, layout in buckets]
        self._bucket_of = {p: i for i, bucket in enumerate(self._buckets) for p in bucket.parameters}
        self._watch = GradientWatch(
            [bucket.parameters for bucket in self._buckets], self._launch, self._forget, self._is_paused
        )
        self._lazy = lazy = LazyWeights(self._model, self._buckets)
        layouts = ShardLayout(self.ranks.world_size, tuple(bucket.layout for bucket in self._buckets))
        self._optimizer = ShardedOptimizer(make, given, self._buckets[::-1], layouts, self.ranks.rank, gather)
        self._optimizer.register_step_post_hook(lambda *_: lazy.after_step())
        return self._optimizer

    @torch.no_grad()
    def finish(self, *, wait: bool = True) -> None:
        """As the Protocol says; the gradients are then in the optimizer's shards, not in `parameter.grad`."""
        assert self._watch is not None
        assert self._optimizer is not None
        parameters = list(self._bucket_of)
        without = set(self._watch.without_gradient())
        for parameter in without:
            parameter.grad = torch.zeros_like(parameter)
        self._watch.launch_rest()
        if not self._order_is_settled:
            self._order_is_settled = True
            in_ready_order = order_of_first_rank(self._watch.order, parameters, self.ranks)
            if not self._accumulated:
                self._watch.watch_ends(in_ready_order)
        unused = [n for n, parameter in enumerate(parameters) if parameter in without] if without else []
        if self.ranks.world_size > 1:
            unused = UsedAnywhere(unused, len(parameters), self.ranks, self.traffic).unused_everywhere()
        if wait:
            self._wait_for_gradients()
        self._optimizer.keep = [self._place_of(parameters[index]) for index in unused]

    def _wait_for_gradients(self) -> None:
        for bucket in self._buckets:
            bucket.wait_reduced()

    @torch.no_grad()
    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        norms, shards = [], []
        for bucket in self._buckets:
            bucket.wait_reduced()  # the last ones travel while the norms of the first are made
            gradient = bucket.master.grad
            if gradient is not None:
                shards.append(gradient)
                wide = torch.promote_types(gradient.dtype, torch.float32)
                norms.append(torch.linalg.vector_norm(gradient, dtype=wide))
        square = torch.linalg.vector_norm(torch.stack(norms)).square()
        if self.ranks.world_size > 1:
            self.traffic.count_all_reduce(square.nbytes, self.ranks.world_size)
            dist.all_reduce(square)
        norm = square.sqrt()
        clip_for(None if self._optimizer is None else self._optimizer.inner, shards, norm, max_norm)
        return norm

    def wait_for_weights(self) -> None:
        if self._lazy is not None:
            self._lazy.wait_all()

    def reset(self) -> None:
        self._forget()
        if self._watch is not None:
            self._watch.reset()

    def _forget(self) -> None:
        for bucket in self._buckets:
            bucket.drop_reduced()

    def _plan(
        self, parameters: Sequence[nn.Parameter], position: dict[nn.Parameter, int]
    ) -> list[list[nn.Parameter]]:
        """Buckets of one parameter group: last layers first, each up to `bucket_mb` of weights."""
        in_ready_order = sorted(parameters, key=lambda parameter: -position[parameter])
        capacity = int(self.options.bucket_mb * MIB)
        buckets = []
        for bucket in fill_buckets(in_ready_order, capacity, self.options.weights):
            *others, last = bucket
            if others and bytes_of(last, self.options.weights) >= capacity:
                buckets.append(others)  # what fills a bucket alone (an embedding) needs no packing
                bucket = [last]
            buckets.append(bucket)
        return buckets

    def _make_gather(self, buckets: Sequence[tuple[list[nn.Parameter], BucketLayout]]) -> WeightGather | None:
        if self._averager is None:
            return None
        one_device = {parameters[0].device for parameters, _ in buckets} == {self.ranks.device}
        self.reads_peers = self.options.gather == "auto" and can_share_memory(self.ranks) and one_device
        if self.reads_peers:
            num_bytes = sum(
                aligned(self.ranks.world_size * layout.shard_size * self._weight_dtype(parameters).itemsize)
                for parameters, layout in buckets
            )
            return PeerGather(PeerMemory(num_bytes, self.ranks), self.ranks, self.traffic)
        return CollectiveGather(self._averager)

    def _weight_dtype(self, parameters: list[nn.Parameter]) -> torch.dtype:
        return wire_dtype_for(parameters[0].dtype, self.options.weights)

    def _make_bucket(
        self, parameters: list[nn.Parameter], layout: BucketLayout, gather: WeightGather | None
    ) -> ShardedBucket:
        weight_dtype = self._weight_dtype(parameters)
        return ShardedBucket(
            parameters,
            layout,
            self.ranks,
            self._averager,
            gather,
            weight_dtype=weight_dtype,
            wire_dtype=wire_dtype_for(weight_dtype, self.options.wire_dtype),
        )

    def _launch(self, index: int) -> None:
        self._buckets[index].reduce()

    def _place_of(self, parameter: nn.Parameter) -> tuple[ShardedBucket, slice]:
        bucket = self._buckets[self._bucket_of[parameter]]
        position = next(i for i, other in enumerate(bucket.parameters) if other is parameter)
        return bucket, bucket.shard_slice(position)
