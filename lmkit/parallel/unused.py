"""Parameters that got no gradient here: did any other rank use them?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from lmkit.parallel.process_group import Ranks
from lmkit.parallel.traffic import Traffic


class UsedAnywhere:
    """One question to all ranks, asked without waiting: which parameters got a gradient?

    A collective: every rank asks, with the same `count` of parameters. Only a rank with unused parameters needs the
    answer; reading it waits for the GPU.

    Args:
        unused: the numbers of the parameters without a gradient on this rank.
    """

    def __init__(self, unused: Sequence[int], count: int, ranks: Ranks, traffic: Traffic) -> None:
        self._unused = unused
        self._used = torch.ones(count, dtype=torch.int32, device=ranks.device)
        if unused:
            self._used[list(unused)] = 0
        traffic.count_all_reduce(self._used.nbytes, ranks.world_size)
        self._work = dist.all_reduce(self._used, op=dist.ReduceOp.MAX, async_op=True)

    def unused_everywhere(self) -> list[int]:
        """Those of `unused` that no rank had a gradient for."""
        if not self._unused:
            return []
        self._work.wait()
        anywhere = self._used.tolist()
        return [number for number in self._unused if not anywhere[number]]
