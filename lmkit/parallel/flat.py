"""`flat`: after the backward pass, copy all gradients into one tensor and all-reduce that."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lmkit.parallel.buckets import ReducingBucket, fill_buckets
from lmkit.parallel.collectives import reduce_dtype_for, unused_everywhere
from lmkit.parallel.protocol import Strategy
from lmkit.registry import STRATEGIES


@STRATEGIES.register("flat", order=3, aliases=("naive bucketed",), uses=("reduce_dtype",), packs="all")
class FlatSync(Strategy):
    """Make one collective per device and dtype. This needs memory for a second copy of the gradients."""

    def _reduce(self, unused: Sequence[int], *, wait: bool) -> Sequence[int]:
        buckets = [
            ReducingBucket(
                parameters,
                self._averager,
                reduce_dtype=reduce_dtype_for(parameters[0].dtype, self.config.reduce_dtype),
                pack=True,
            )
            for parameters in fill_buckets(self.parameters, capacity=sys.maxsize)
        ]
        for bucket in buckets:
            bucket.wait()
        return unused_everywhere(unused, len(self.parameters), self.ranks, self.traffic)
