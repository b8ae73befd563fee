"""Parameters that got no gradient here: did any other rank use them?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from lmkit.parallel.process_group import Ranks
from lmkit.parallel.traffic import Traffic


def unused_everywhere(unused: Sequence[int], count: int, ranks: Ranks, traffic: Traffic) -> list[int]:
    """Those of `unused` (numbers of parameters without a gradient on this rank) that no rank had one for.

    A collective: every rank calls it with the same `count` of parameters. Only a rank with unused parameters
    reads the answer, and so waits for the GPU.
    """
    used = torch.ones(count, dtype=torch.int32, device=ranks.device)
    if unused:
        used[list(unused)] = 0
    traffic.count_all_reduce(used.nbytes, ranks.world_size)
    dist.all_reduce(used, op=dist.ReduceOp.MAX)
    if not unused:
        return []
    anywhere = used.tolist()
    return [number for number in unused if not anywhere[number]]
