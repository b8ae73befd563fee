"""`naive`: after the backward pass, one blocking all-reduce per parameter. The ladder's first rung."""

from __future__ import annotations

from lmkit.parallel.replicated import ReplicatedSync


class NaiveSync(ReplicatedSync):
    """Pays the latency of a collective once per parameter and overlaps nothing. Heeds no options."""

    def _reduce(self) -> None:
        for parameter in self.parameters:
            assert parameter.grad is not None
            self._averager.all_reduce(parameter.grad).wait()
