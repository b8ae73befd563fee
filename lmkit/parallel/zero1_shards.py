"""The memory and the step of `zero1`: every rank has the whole weights, and updates its shard of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lmkit.core.buckets import fill_buckets
from lmkit.optim.adamw import AdamW
from lmkit.parallel.collectives import reduce_dtype_for
from lmkit.parallel.gather import Gather
from lmkit.parallel.ranks import Ranks
from lmkit.parallel.sharded_state import ShardedState
from lmkit.parallel.shards import FlatShards, Piece
from lmkit.parallel.strategy import MakeOptimizer

STEP_PARTS = 2
"""Parts of a step: gathering the weights of one part overlaps the arithmetic of the next. Each part costs the GPU
several small kernels."""


def plan_shards(
    groups: Sequence[Sequence[nn.Parameter]],
    names: Mapping[nn.Parameter, str],
    *,
    capacity: int,
    weights: str,
) -> list[tuple[int, list[nn.Parameter]]]:
    """Assign the parameters of each group that need gradients to buckets, in the order of launching.

    Args:
        names: every parameter's name (see `parameter_names`), in the order of the forward pass: the last parameter
            becomes ready first.
        capacity: bytes of a bucket, counted in the dtype of `weights`.

    Returns:
        For each bucket, the index of its group and its parameters.
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

    Args:
        weight_dtype: cast the parameters to this dtype; `shard` then keeps this rank's elements in the old dtype.
        names, ranks, links: see `FlatShards`.

    Attributes:
        weights: the parameters' storage, (size,).
        own_weights: this rank's part of `weights`, a view; `shard` itself, unless the weights were cast.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        ranks: Ranks,
        *,
        weight_dtype: torch.dtype,
        **links: Any,
    ) -> None:
        super().__init__(parameters, names, ranks, **links)
        self._casts = True
        first = self.parameters[0]
        allocate = torch.zeros if self._gathers is None else self._gathers.allocate
        self.weights = allocate(self.size, dtype=weight_dtype, device=first.device)
        self.saves_masters = weight_dtype != first.dtype
        whole = self.weights
        if self.saves_masters:
            whole = torch.zeros(self.size, dtype=first.dtype, device=first.device)
        for parameter, part in zip(self.parameters, self._parts(whole), strict=True):
            part.copy_(parameter.detach())
        if self.saves_masters:
            self.weights.copy_(whole)
        for parameter, part in zip(self.parameters, self._parts(self.weights), strict=True):
            parameter.data = part
        self.own_weights = self.own_of(self.weights)
        self.shard = self.own_of(whole).clone() if self.saves_masters else self.own_weights
        self.pieces = [Piece(self.parameters, self.names, self.shard, *self.own_range(0, self.size))]

    def keep_reduce_dtype(self) -> None:
        """Do not cast gradients: the optimizer reads them in the reduced dtype and writes `own_weights` itself."""
        self._casts = False
        self.shard.grad_dtype = None  # any

    def _first(self, mean: torch.Tensor) -> torch.Tensor:
        return mean.to(self.shard.dtype) if self._casts else mean

    def reduce(self) -> None:
        self.wait_gathered()  # returns at once if a layer that ran has read these weights
        super().reduce()

    def wait_reduced(self) -> None:
        super().wait_reduced()
        self.give_gradients()

    def take_own_gradients(self) -> None:
        """Take this rank's part of already averaged gradients; zeros for parameters without one."""
        self.gradient = torch.zeros(self.shard_size, dtype=self._reduce_dtype, device=self.weights.device)
        for position, parameter in enumerate(self.parameters):
            in_shard, in_parameter = self.own_part(position)
            if parameter.grad is not None and in_shard.start < in_shard.stop:
                self.gradient[in_shard] = parameter.grad.reshape(-1)[in_parameter]

    def write_shard(self) -> None:
        """Copy the changed shard to the weights."""
        if self.saves_masters:
            self.own_weights.copy_(self.shard)

    def take_weights(self) -> None:
        """Copy the loaded weights to the shard."""
        if self.saves_masters:
            self.shard.copy_(self.own_weights)

    def take_own(self, weights: Mapping[str, torch.Tensor]) -> None:
        if self.saves_masters:
            super().take_own(weights)

    def wait_gathered(self) -> None:
        """Wait until the parameters are whole (on GPUs: for the current stream)."""
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None


def start_gather(buckets: Sequence[KeptShards], gathers: Gather | None) -> None:
    """Start collecting the other ranks' shards of the buckets' weights."""
    if gathers is not None:
        arrivals = gathers.refill([bucket.weights for bucket in buckets])
        for bucket, arriving in zip(buckets, arrivals, strict=True):
            bucket._arriving = arriving


class Zero1Optimizer(ShardedState):
    """Update this rank's shards of all buckets, then start gathering the weights (Rajbhandari et al. 2020, P_os).

    `LazyWeights` waits before a layer reads weights. Our AdamW reads gradients in the dtype in which they were
    reduced, and writes shards and weights together.

    Args:
        make, groups, ranks: see `ShardedState`.
        buckets: in the order in which their gradients are reduced.
        gathers: collects the shards; None if this rank is alone.

    Attributes:
        keep: elements that the next step must not change: those of parameters that no rank used.
    """

    _flats: list[KeptShards]  # type: ignore[assignment]

    def __init__(
        self,
        make: MakeOptimizer,
        groups: Sequence[dict[str, Any]],
        buckets: Sequence[KeptShards],
        ranks: Ranks,
        gathers: Gather | None,
    ) -> None:
        self.keep: list[tuple[KeptShards, slice]] = []
        self._gathers = gathers
        super().__init__(make, groups, buckets, ranks, self._spread_all)

    def _own(self, flats: Sequence[FlatShards], group_of: Mapping[nn.Parameter, int]) -> None:
        super()._own(flats, group_of)
        self._step_parts = _split_evenly(
            self._flats[::-1], STEP_PARTS
        )  # in the order of the next forward pass
        if isinstance(self.inner, AdamW) and self.inner.writes_copies:
            self.inner.copies = {b.shard: b.own_weights for b in self._flats if b.saves_masters}
            for bucket in self._flats:
                bucket.keep_reduce_dtype()

    def _step(self) -> None:
        known = {bucket: self.inner.state.get(bucket.shard, {}).copy() for bucket, _ in self.keep}
        kept = [
            (tensor[where], tensor[where].clone())
            for bucket, where in self.keep
            for tensor in (bucket.shard, *filter(_is_per_element, known[bucket].values()))
        ]
        arrived = {bucket: bucket.gradient for bucket in self._flats}
        for bucket in arrived:
            bucket.gradient = bucket.shard.grad = None
        for part in self._step_parts:
            for bucket in part:
                bucket.gradient = arrived[bucket]
                bucket.wait_reduced()
            self.inner.step()
            for bucket in part:
                bucket.drop_reduced()
            if not self.keep:
                self._gather(part)
        for tensor, before in kept:
            tensor.copy_(before)
        for bucket, where in self.keep:
            for key, value in self.inner.state[bucket.shard].items():
                if key not in known[bucket] and _is_per_element(value):
                    value[where] = 0  # initial state; decay may have changed it without a gradient
        for part in self._step_parts if self.keep else ():
            self._gather(part)
        self.keep = []

    def _gather(self, buckets: Sequence[KeptShards]) -> None:
        if self.keep or not getattr(self.inner, "writes_copies", False):  # our AdamW has written the weights
            for bucket in buckets:
                bucket.write_shard()
        start_gather(buckets, self._gathers)

    def _spread_all(self) -> None:
        for bucket in self._flats:
            bucket.write_shard()
        start_gather(self._flats, self._gathers)
        for bucket in self._flats:
            bucket.wait_gathered()


def _is_per_element(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 1


def _split_evenly(buckets: Sequence[KeptShards], parts: int) -> list[list[KeptShards]]:
    """Split into consecutive runs with about equal numbers of elements."""
    total = sum(bucket.shard_size for bucket in buckets)
    runs: list[list[KeptShards]] = [[] for _ in range(parts)]
    before = 0
    for bucket in buckets:
        runs[min(parts - 1, before * parts // total)].append(bucket)
        before += bucket.shard_size
    return [run for run in runs if run]
