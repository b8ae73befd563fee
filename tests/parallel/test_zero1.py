"""`zero1` on one process: gradients wait for weights that are under way."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from lmkit.core.buckets import PendingMean
from lmkit.parallel.gather import Links
from lmkit.parallel.ranks import Ranks
from lmkit.parallel.zero1 import KeptShards, start_gather


class Backend:
    """Gathers and averages: weights become 9 when they are waited for, and `events` says what was waited for."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.allocate = torch.zeros
        self._flats: list[torch.Tensor] = []

    def refill(self, flats: list[torch.Tensor]) -> list[Backend]:
        self._flats = list(flats)
        return [self for _ in flats]

    def wait(self) -> None:
        self.events.append("weights arrived")
        for flat in self._flats:
            flat.fill_(9)

    def reduce_scatter(self, flat: torch.Tensor) -> PendingMean:
        self.events.append("gradients go")
        return PendingMean([SimpleNamespace(wait=lambda: self.events.append("gradients end"))], [flat[:128]])


def test_a_rank_sends_gradients_only_when_it_has_read_the_weights():
    """Or another could step its shard while this one still reads it: no layer needs to have run."""
    weight, backend, dtype = nn.Linear(4, 4, bias=False).weight, Backend(), torch.float32
    links = Links(Ranks(world_size=2), backend, backend)  # type: ignore[arg-type]
    bucket = KeptShards([weight], {weight: "weight"}, links, weight_dtype=dtype, reduce_dtype=dtype)
    start_gather([bucket])
    weight.grad = torch.ones(4, 4)
    bucket.reduce()
    assert backend.events == ["weights arrived", "gradients go"]
