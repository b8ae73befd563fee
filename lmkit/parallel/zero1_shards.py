"""ZeRO-1 shards: the flat buckets that parameters are moved into, and this rank's part of each.

A bucket holds its parameters one after the other, padded to a multiple of the world size. Rank r owns the elements
[r * shard_size, (r + 1) * shard_size) of everything that the optimizer keeps; a shard may begin inside a parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch._utils import _unflatten_dense_tensors

from lmkit.core.buckets import PendingMean, Work, fill_buckets, gradients_of
from lmkit.optim.muon import MatrixShard, maps_of
from lmkit.parallel.collectives import Averager, reduce_dtype_for
from lmkit.parallel.gather import WeightGather
from lmkit.parallel.ranks import Ranks

SHARD_ALIGNMENT = 128
"""Elements. Every rank's part starts at a multiple, as vectorised kernels and NCCL prefer."""

StateDict = dict[str, Any]
ParameterStates = dict[str, dict[str, torch.Tensor]]
"""parameter name -> name of the state ("exp_avg", "master", ...) -> flat tensor of the whole parameter, or scalar."""


# --- Layout: which elements lie where.


@dataclass(frozen=True)
class BucketLayout:
    """One bucket: the index of its parameter group, names and sizes of its parameters, elements per rank.

    A parameter has one name, or several of its parts, as `parameter_names` returns them.
    """

    group: int
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    shard_size: int

    @property
    def num_elements(self) -> int:
        """Elements without the padding."""
        return sum(self.sizes)


@dataclass(frozen=True)
class ShardLayout:
    """All buckets, for one world size."""

    world_size: int
    buckets: tuple[BucketLayout, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> ShardLayout:
        buckets = tuple(
            BucketLayout(b["group"], tuple(b["names"]), tuple(b["sizes"]), b["shard_size"])
            for b in content["buckets"]
        )
        return ShardLayout(content["world_size"], buckets)

    def require_own(self, state_dict: Mapping[str, Any], rank: int) -> None:
        """Refuse an optimizer state that this rank did not save under this layout.

        Raises:
            ValueError: it has another layout or rank.
        """
        if state_dict["rank"] != rank or ShardLayout.from_json(state_dict["layout"]) != self:
            raise ValueError("the state has another layout or rank; load_resharded takes all ranks' states")


def state_for(exact: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a copy of saved state for the weights `exact`, in their dtype and where they are; scalars stay."""
    return value.to(exact.device, exact.dtype, copy=True) if value.ndim else value.clone()


def shard_size_of(num_elements: int, world_size: int) -> int:
    """Return the elements per rank: an equal share, rounded up to `SHARD_ALIGNMENT`."""
    unit = world_size * SHARD_ALIGNMENT
    return -(-num_elements // unit) * SHARD_ALIGNMENT


def plan_shards(
    groups: Sequence[Sequence[nn.Parameter]],
    names: Mapping[nn.Parameter, Mapping[str, torch.Size]],
    *,
    capacity: int,
    weights: str,
    world_size: int,
) -> list[tuple[list[nn.Parameter], BucketLayout]]:
    """Assign the parameters of each group that need gradients to buckets, in the order of launching.

    Args:
        names: every parameter's names and their shapes (see `parameter_names`), in the order of the forward pass: the
            last parameter becomes ready first.
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
    planned.sort(key=lambda item: -min(position[parameter] for parameter in item[1]))
    buckets = []
    for index, parameters in planned:
        sizes = {name: shape.numel() for p in parameters for name, shape in names[p].items()}
        shard_size = shard_size_of(sum(sizes.values()), world_size)
        layout = BucketLayout(index, tuple(sizes), tuple(sizes.values()), shard_size)
        buckets.append((parameters, layout))
    return buckets


def consolidate(states: Sequence[StateDict]) -> ParameterStates:
    """Join the state dicts of all ranks (in the order of the ranks) into whole tensors per parameter.

    Raises:
        ValueError: a rank's state dict is missing, doubled, or belongs to another layout.
    """
    layout = ShardLayout.from_json(states[0]["layout"])
    found = [state["rank"] for state in states]
    if found != list(range(layout.world_size)):
        raise ValueError(f"need the state of ranks 0 to {layout.world_size - 1} in order, got {found}")
    if any(ShardLayout.from_json(state["layout"]) != layout for state in states):
        raise ValueError("the ranks' states have different layouts: they are not of one checkpoint")
    whole: ParameterStates = {name: {} for bucket in layout.buckets for name in bucket.names}
    for index, bucket in enumerate(layout.buckets):
        held = [state["state"].get(str(index), {}) for state in states]
        for key in dict.fromkeys(key for state in held for key in state):
            values = [state[key] for state in held if key in state]
            if values[0].ndim == 0:  # a step counter: equal for all elements of the bucket
                parts: Sequence[torch.Tensor] = [values[0]] * len(bucket.names)
            else:
                parts = torch.cat(values)[: bucket.num_elements].split(bucket.sizes)
            for name, part in zip(bucket.names, parts, strict=True):
                whole[name][key] = part
    return whole


def take_shards(whole: ParameterStates, layout: ShardLayout, rank: int) -> dict[str, dict[str, torch.Tensor]]:
    """Cut whole per-parameter states into `rank`'s shards: bucket index (as text) -> state -> tensor.

    Raises:
        ValueError: a parameter of the layout has no state although others of its bucket do.
    """
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for index, bucket in enumerate(layout.buckets):
        states = [whole.get(name, {}) for name in bucket.names]
        keys = sorted({key for state in states for key in state})
        lacking = [name for name, state in zip(bucket.names, states, strict=True) if len(state) != len(keys)]
        if lacking:
            raise ValueError(f"no optimizer state for {', '.join(lacking)}")
        shards[str(index)] = {key: _cut([state[key] for state in states], bucket, rank) for key in keys}
    return shards


def _cut(parts: Sequence[torch.Tensor], bucket: BucketLayout, rank: int) -> torch.Tensor:
    if parts[0].ndim == 0:
        return parts[0].clone()
    padded = parts[0].new_zeros(max(bucket.num_elements, (rank + 1) * bucket.shard_size))
    torch.cat([part.reshape(-1) for part in parts], out=padded[: bucket.num_elements])
    return padded[rank * bucket.shard_size : (rank + 1) * bucket.shard_size].clone()


# --- Memory: one bucket's weights, this rank's shard of them, and its collectives.


class ShardedBucket:
    """Move parameters into one flat tensor; this rank's optimizer updates one shard of it.

    Args:
        averager: reduces the gradients; None if this rank is alone or its gradients are already averaged.
        gather: allocates the weights and collects the shards; None if this rank is alone.
        weight_dtype: cast the parameters to this dtype; the shard then keeps a master copy in the old dtype.
        reduce_dtype: dtype in which gradients are reduced.

    Attributes:
        weights: the parameters' storage, (world_size * shard_size,).
        shard: this rank's part of `weights`, a view.
        master: the tensor that the optimizer updates, (shard_size,): the shard itself, or its fp32 copy.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        layout: BucketLayout,
        ranks: Ranks,
        averager: Averager | None,
        gather: WeightGather | None,
        *,
        weight_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
    ) -> None:
        self.parameters = list(parameters)
        self.layout = layout
        self._sizes = [parameter.numel() for parameter in self.parameters]
        self._ranks = ranks
        self._averager = averager
        self._reduce_dtype = reduce_dtype
        self._pending: PendingMean | None = None
        self._arriving: Work | None = None
        self._casts = True
        first = self.parameters[0]
        num_elements = ranks.world_size * layout.shard_size
        allocate = torch.zeros if gather is None else gather.allocate
        self.weights = allocate(num_elements, dtype=weight_dtype, device=first.device)
        self.has_own_master = weight_dtype != first.dtype
        whole = self.weights
        if self.has_own_master:
            whole = torch.zeros(num_elements, dtype=first.dtype, device=first.device)
        for parameter, part in zip(self.parameters, self._parts(whole), strict=True):
            part.copy_(parameter.detach())
        if self.has_own_master:
            self.weights.copy_(whole)
        for parameter, part in zip(self.parameters, self._parts(self.weights), strict=True):
            parameter.data = part
        self.shard = self.shard_of(self.weights)
        self.master = self.shard_of(whole).clone() if self.has_own_master else self.shard

    def matrices(self, parts: Mapping[nn.Parameter, Sequence[int]]) -> MatrixShard:
        """Return this rank's part of the linear maps. `parts`: parameter -> the rows of its maps."""
        starts = [sum(self._sizes[:index]) for index in range(len(self._sizes))]
        return MatrixShard(
            self.master,
            [(self.master, slice(0, self.layout.shard_size))],
            [
                linear_map
                for parameter, start in zip(self.parameters, starts, strict=True)
                for linear_map in maps_of(parts[parameter], parameter.shape[1], start)
            ],
            self._ranks.rank * self.layout.shard_size,
            self._gather_part,
            lambda: self.master.grad is not None,
        )

    def _gather_part(self, part: torch.Tensor) -> torch.Tensor:
        if self._averager is None:
            return part
        whole = part.new_empty(self.weights.numel())
        self.shard_of(whole).copy_(part)
        self._averager.all_gather(whole).wait()
        return whole

    def keep_reduce_dtype(self) -> None:
        """Do not cast gradients: the optimizer reads them in the reduced dtype and writes `shard` itself."""
        self._casts = False
        self.master.grad_dtype = None  # any

    def shard_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a flat tensor of the bucket, as a view."""
        return flat.chunk(self._ranks.world_size)[self._ranks.rank]

    def shard_slice(self, position: int) -> slice:
        """Return where the `position`-th parameter overlaps this rank's shard (may be empty)."""
        start = sum(self._sizes[:position]) - self._ranks.rank * self.layout.shard_size
        stop = start + self._sizes[position]
        return slice(max(start, 0), max(min(stop, self.layout.shard_size), 0))

    def reduce(self) -> None:
        """Start averaging the parameters' gradients (none of them None), and release them."""
        self.wait_gathered()  # returns at once if a layer that ran has read these weights
        flat = pack(gradients_of(self.parameters), self.weights.numel(), self._reduce_dtype)
        for parameter in self.parameters:
            parameter.grad = None
        if self._averager is None:
            self.take_gradient(flat)
        else:
            self._pending = self._averager.reduce_scatter(flat)

    def wait_reduced(self) -> None:
        """Wait until `master.grad` is this rank's part of the mean gradient (on GPUs: for the current stream)."""
        if self._pending is not None:
            (shard,) = self._pending.wait()
            self.take_gradient(shard)
            self._pending = None

    def take_gradient(self, shard: torch.Tensor) -> None:
        """Hand this rank's part of the mean gradient to the optimizer."""
        self.master.grad = shard.to(self.master.dtype) if self._casts else shard

    def take_own_gradients(self) -> None:
        """Hand the optimizer its part of already averaged gradients; zeros for parameters without one."""
        shard = torch.zeros(self.layout.shard_size, dtype=self._reduce_dtype, device=self.weights.device)
        for position, parameter in enumerate(self.parameters):
            where = self.shard_slice(position)
            if parameter.grad is not None and where.start < where.stop:
                before = self._ranks.rank * self.layout.shard_size - sum(self._sizes[:position])
                shard[where] = parameter.grad.reshape(-1)[before + where.start : before + where.stop]
        self.take_gradient(shard)

    def drop_reduced(self) -> None:
        """Forget the mean gradient, even if it is still being reduced."""
        if self._pending is not None:
            self._pending.abandon()
            self._pending = None
        self.master.grad = None

    def write_shard(self) -> None:
        """Copy the changed master to the weights of this rank's shard."""
        if self.has_own_master:
            self.shard.copy_(self.master)

    def take_weights(self) -> None:
        """Copy the loaded weights to the master."""
        if self.has_own_master:
            self.master.copy_(self.shard)

    def wait_gathered(self) -> None:
        """Wait until the parameters are whole (on GPUs: for the current stream)."""
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None

    def forget_in_flight(self) -> None:
        """Wait no more. Call it when all collectives have ended."""
        self._arriving = self._pending = None

    def _parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the parameters' places in a flat tensor, in their shapes."""
        parts = flat[: self.layout.num_elements].split(self._sizes)
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]


def pack(gradients: list[torch.Tensor], size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return all gradients in one flat tensor (size,), padded with zeros. A single gradient that needs no cast or
    padding is returned without a copy."""
    first = gradients[0]
    if first.numel() == size and first.dtype == dtype and first.is_contiguous():
        return first.view(-1)
    flat = torch.empty(size, dtype=dtype, device=first.device)
    filled = sum(gradient.numel() for gradient in gradients)
    flat[filled:].zero_()  # the allocator's leftovers must not be reduced
    if first.dtype == dtype:
        torch.cat(
            [gradient.reshape(-1) for gradient in gradients], out=flat[:filled]
        )  # faster than `_foreach_copy_`
    else:
        torch._foreach_copy_(_unflatten_dense_tensors(flat, gradients), gradients)
    return flat


def start_gather(buckets: Sequence[ShardedBucket], gather: WeightGather | None) -> None:
    """Start collecting the other ranks' shards of the buckets' weights."""
    if gather is not None:
        arrivals = gather.start([bucket.weights for bucket in buckets])
        for bucket, arriving in zip(buckets, arrivals, strict=True):
            bucket._arriving = arriving
