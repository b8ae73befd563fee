"""The process groups of `fsdp`: ranks that share a copy of the model, and ranks that hold the same shard."""

from __future__ import annotations

import functools
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from lmkit.model.memory import PEER_LAYER_BYTES
from lmkit.parallel.collectives import Averager, Traffic, reduce_dtype_for
from lmkit.parallel.fsdp_gather import PeerShardGather, ShardGather
from lmkit.parallel.gather import can_share_memory
from lmkit.parallel.ranks import Ranks
from lmkit.parallel.zero1 import forward_units


class Links(NamedTuple):
    """The links that `FlatParameters` takes. All are None if this rank is alone."""

    gathers: ShardGather | None = None
    reductions: Averager | None = None
    replicas: Averager | None = None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that share a copy of the model; None: all."""
        return None if self.reductions is None else self.reductions.group


def reads_peers(model: nn.Module, ranks: Ranks, weights: str) -> bool:
    """Return whether copies from the memory of other GPUs are possible, and faster than the backend. Collective.

    Args:
        weights: `parallel.weights`, the dtype of gathered weights.
    """
    size = sum(p.numel() * reduce_dtype_for(p.dtype, weights).itemsize for p in model.parameters())
    small = size <= PEER_LAYER_BYTES * len(list(forward_units(model)))
    one_device = {parameter.device for parameter in model.parameters()} == {ranks.device}
    return small and can_share_memory(ranks) and one_device


def link(ranks: Ranks, within: Ranks, traffic: Traffic, *, reads_peers: bool) -> Links:
    """Return the links by which this rank communicates. Collective.

    Args:
        within: this rank's place among the `within.world_size` consecutive ranks that share its copy of the model.
        reads_peers: gather by reading the memory of other GPUs; only where all ranks share one copy.
    """
    groups = _groups(dist.group.WORLD, within.world_size, ranks.timeout_s)
    replicas = None
    if within.world_size < ranks.world_size:
        copies = ranks.world_size // within.world_size
        across = replace(within, rank=ranks.rank // within.world_size, world_size=copies)
        replicas = Averager(across, traffic, groups["replicas"])
    averager = Averager(within, traffic, groups["gathers"])
    gathers = PeerShardGather(averager, ranks, traffic) if reads_peers else ShardGather(averager)
    return Links(gathers, Averager(within, traffic, groups["reductions"]), replicas)


@functools.lru_cache(maxsize=1)
def _groups(world: dist.ProcessGroup, count: int, timeout_s: float) -> dict[str, Any]:
    """Return this rank's process groups. Collective.

    The `count` ranks that share a copy of the model have two groups; the ranks that keep the same shard have one.
    """
    ranks = list(range(world.size()))
    copies = [ranks[start : start + count] for start in range(0, len(ranks), count)]
    members = {"reductions": copies}
    found: dict[str, Any] = {"gathers": None}  # the default group
    if len(copies) > 1:
        members |= {"gathers": copies, "replicas": [ranks[index::count] for index in range(count)]}
    for name, groups in members.items():
        for group in groups:
            # Every rank takes part in making each group.
            made = dist.new_group(group, timeout=timedelta(seconds=timeout_s))
            if world.rank() in group:
                found[name] = made
    return found
