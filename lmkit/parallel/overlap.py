"""`overlap`: all-reduce every gradient on its own, the moment it is ready, while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lmkit.parallel.bucketed import BucketedSync
from lmkit.registry import STRATEGIES


@STRATEGIES.register("overlap", order=4, aliases=("individual",), uses=("reduce_dtype",))
class OverlapSync(BucketedSync):
    """`bucketed` with one parameter per bucket."""

    def _plan(self, in_ready_order: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        return [[parameter] for parameter in in_ready_order]
