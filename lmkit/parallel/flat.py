"""`flat`: after the backward pass, all gradients in one tensor, one all-reduce. Full bandwidth, no overlap."""

from __future__ import annotations

from lmkit.parallel.packing import ReducingBucket, gradients_of, group_by_kind, pack_gradients
from lmkit.parallel.reduction import wire_dtype_for
from lmkit.parallel.replicated import ReplicatedSync


class FlatSync(ReplicatedSync):
    """One collective per device and dtype. Needs room for a second copy of the gradients while it packs.

    Heeds `wire_dtype` (for fp32 gradients).
    """

    def _reduce(self) -> None:
        buckets = []
        for parameters in group_by_kind(self.parameters):
            wire_dtype = wire_dtype_for(parameters[0].dtype, self.options.wire_dtype)
            packed = pack_gradients(parameters, gradients_of(parameters), wire_dtype)
            buckets.append(ReducingBucket(packed, self._averager.all_reduce(packed.flat)))
        for bucket in buckets:
            bucket.wait()
