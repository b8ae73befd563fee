"""`naive`: all-reduce every parameter's gradient after the backward pass, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from lmkit.parallel.collectives import unused_everywhere
from lmkit.parallel.protocol import Strategy
from lmkit.registry import STRATEGIES


@STRATEGIES.register("naive", order=2, aliases=("Naive DDP",))
class NaiveSync(Strategy):
    """Pay the latency of a collective once per parameter and overlap nothing."""

    def _reduce(self, unused: Sequence[int], *, wait: bool) -> Sequence[int]:
        for parameter in self.parameters:
            assert parameter.grad is not None
            self._averager.all_reduce([parameter.grad]).wait()
        return unused_everywhere(unused, len(self.parameters), self.ranks, self.traffic)
