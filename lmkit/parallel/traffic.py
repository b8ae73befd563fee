"""Counting what is communicated, to hold it against the formula."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Traffic:
    """What this rank handed to collectives since the last `reset`.

    Attributes:
        calls: collectives started; a tensor that is read from the other ranks' memory counts as one.
        payload_bytes: size of the tensors that were reduced or gathered.
        link_bytes: what a bandwidth-optimal (ring) algorithm sends per rank for them: 2 (W-1)/W of an
            all-reduce's bytes, (W-1)/W of a reduce-scatter's or all-gather's
            (Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations"), and of a
            broadcast's on average: all ranks but one pass it on.
    """

    calls: int = 0
    payload_bytes: int = 0
    link_bytes: float = 0.0

    def count_all_reduce(self, num_bytes: int, world_size: int, calls: int = 1) -> None:
        self._count(num_bytes, 2.0, world_size, calls)

    def count_scatter_or_gather(self, num_bytes: int, world_size: int) -> None:
        """One reduce-scatter or all-gather whose full side (all ranks' parts) has `num_bytes`."""
        self._count(num_bytes, 1.0, world_size, 1)

    def count_broadcast(self, num_bytes: int, world_size: int) -> None:
        self._count(num_bytes, 1.0, world_size, 1)

    def reset(self) -> None:
        self.calls, self.payload_bytes, self.link_bytes = 0, 0, 0.0

    def _count(self, num_bytes: int, passes: float, world_size: int, calls: int) -> None:
        self.calls += calls
        self.payload_bytes += num_bytes
        self.link_bytes += passes * (world_size - 1) / world_size * num_bytes
