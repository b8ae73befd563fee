"""One bucket of `zero1`: the parameters' common flat storage, this rank's shard of it, and its collectives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch._utils import _unflatten_dense_tensors

from lmkit.parallel.packing import gradients_of
from lmkit.parallel.process_group import Ranks
from lmkit.parallel.reduction import Averager, PendingMean
from lmkit.parallel.weight_gather import Arrival, WeightGather
from lmkit.parallel.zero1_layout import BucketLayout


class ShardedBucket:
    """Moves its parameters into one flat tensor, of which the optimizer on this rank updates one shard.

    Args:
        gather: where the weights lie, and how the shards come together; None if this rank is alone.
        weight_dtype: what the parameters become; if it is not theirs, the shard gets a master copy in theirs.
        wire_dtype: in which gradients are reduced.

    Attributes:
        master: what the optimizer steps, (shard_size,): the shard itself, or its fp32 copy.
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
        wire_dtype: torch.dtype,
    ) -> None:
        self.parameters = list(parameters)
        self.layout = layout
        self._ranks = ranks
        self._averager = averager
        self._wire_dtype = wire_dtype
        self._pending: PendingMean | None = None
        self._arriving: Arrival | None = None
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

    def leave_casts(self) -> None:
        """The optimizer takes gradients in the dtype in which they travelled, and writes `shard` from the master."""
        self._casts = False
        self.master.grad_dtype = None  # any

    def shard_of(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of a flat tensor of the bucket, as a view."""
        return flat.chunk(self._ranks.world_size)[self._ranks.rank]

    def shard_slice(self, position: int) -> slice:
        """Where the `position`-th parameter overlaps this rank's shard (may be empty)."""
        start = sum(self.layout.sizes[:position]) - self._ranks.rank * self.layout.shard_size
        stop = start + self.layout.sizes[position]
        return slice(max(start, 0), max(min(stop, self.layout.shard_size), 0))

    def reduce(self) -> None:
        """Start averaging the parameters' gradients (all present; they are released)."""
        self.wait_gathered()  # nothing is left to wait for, unless no layer that ran read these weights
        flat = self._pack(gradients_of(self.parameters))
        for parameter in self.parameters:
            parameter.grad = None
        if self._averager is None:
            self._take_gradient(flat)
        else:
            self._pending = self._averager.reduce_scatter(flat)

    def _pack(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """All of them in one padded tensor; a single one that needs neither cast nor padding is that tensor."""
        first = gradients[0]
        if (
            first.numel() == self.weights.numel()
            and first.dtype == self._wire_dtype
            and first.is_contiguous()
        ):
            return first.view(-1)
        flat = torch.empty(self.weights.numel(), dtype=self._wire_dtype, device=first.device)
        if flat.numel() > self.layout.num_elements:
            padding = flat[self.layout.num_elements :]
            padding.zero_()  # it must not carry what the allocator left there
        torch._foreach_copy_(_unflatten_dense_tensors(flat, gradients), gradients)
        return flat

    def wait_reduced(self) -> None:
        """On return (on GPUs: for the current stream) `master.grad` is this rank's part of the mean gradient."""
        if self._pending is not None:
            (shard,) = self._pending.wait()
            self._take_gradient(shard)
            self._pending = None

    def _take_gradient(self, shard: torch.Tensor) -> None:
        self.master.grad = shard.to(self.master.dtype) if self._casts else shard

    def drop_reduced(self) -> None:
        """Forget the mean gradient, also one that is under way."""
        if self._pending is not None:
            self._pending.work.wait()
            self._pending = None
        self.master.grad = None

    def write_shard(self) -> None:
        """The master was changed: the weights of this rank's shard follow it."""
        if self.has_own_master:
            self.shard.copy_(self.master)

    def wait_gathered(self) -> None:
        """On return (on GPUs: for the current stream) the parameters are whole."""
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None

    def take_weights(self) -> None:
        """The weights were changed from outside (loaded): the master follows them."""
        if self.has_own_master:
            self.master.copy_(self.shard)

    def _parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parameters' places in a flat tensor, in their shapes."""
        parts = flat[: self.layout.num_elements].split(self.layout.sizes)
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]


def start_gather(buckets: Sequence[ShardedBucket], gather: WeightGather | None) -> None:
    """Start collecting the other ranks' shards of the buckets' weights."""
    if gather is not None:
        arrivals = gather.start([bucket.weights for bucket in buckets])
        for bucket, arriving in zip(buckets, arrivals, strict=True):
            bucket._arriving = arriving
