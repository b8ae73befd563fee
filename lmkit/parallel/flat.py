"""`flat`: after the backward pass, all gradients in one tensor, one all-reduce. Full bandwidth, no overlap."""

from __future__ import annotations

from collections.abc import Sequence

from lmkit.parallel.packing import ReducingBucket, gradients_of, group_by_kind, pack_gradients
from lmkit.parallel.reduction import wire_dtype_for
from lmkit.parallel.replicated import ReplicatedSync
from lmkit.parallel.unused import UsedAnywhere
from lmkit.registry import STRATEGIES


@STRATEGIES.register("flat", order=3, aliases=("naive bucketed",), uses=("wire_dtype",))
class FlatSync(ReplicatedSync):
    """One collective per device and dtype. Needs room for a second copy of the gradients while it packs.

    Heeds `wire_dtype` (for fp32 gradients).
    """

    def _reduce(self, unused: Sequence[int], *, wait: bool) -> Sequence[int]:
        buckets = []
        for parameters in group_by_kind(self.parameters):
            wire_dtype = wire_dtype_for(parameters[0].dtype, self.options.wire_dtype)
            packed = pack_gradients(parameters, gradients_of(parameters), wire_dtype)
            buckets.append(ReducingBucket(self._averager.all_reduce([packed.flat]), packed))
        for bucket in buckets:
            bucket.wait()
        return UsedAnywhere(unused, len(self.parameters), self.ranks, self.traffic).unused_everywhere()
