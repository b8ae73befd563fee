"""`naive`: after the backward pass, one blocking all-reduce per parameter. The ladder's first rung."""

from __future__ import annotations

from collections.abc import Sequence

from lmkit.parallel.replicated import ReplicatedSync
from lmkit.parallel.unused import UsedAnywhere
from lmkit.registry import STRATEGIES


@STRATEGIES.register("naive", order=2, aliases=("Naive DDP",))
class NaiveSync(ReplicatedSync):
    """Pays the latency of a collective once per parameter and overlaps nothing. Heeds no options."""

    def _reduce(self, unused: Sequence[int], *, wait: bool) -> Sequence[int]:
        for parameter in self.parameters:
            assert parameter.grad is not None
            self._averager.all_reduce([parameter.grad]).wait()
        return UsedAnywhere(unused, len(self.parameters), self.ranks, self.traffic).unused_everywhere()
