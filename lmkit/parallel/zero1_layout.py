"""Where every parameter lies in the flat buckets of `zero1`, and how optimizer state moves between layouts.

A bucket is its parameters one after the other, padded to a multiple of the world size; rank r holds elements
[r * shard_size, (r + 1) * shard_size) of everything the optimizer keeps, across the borders of parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

SHARD_ALIGNMENT = 128
"""Elements: every rank's part starts where vectorised kernels and NCCL like it."""

StateDict = dict[str, Any]
ParameterStates = dict[str, dict[str, torch.Tensor]]
"""parameter name -> name of the state ("exp_avg", "master", ...) -> flat tensor of the whole parameter, or scalar."""


@dataclass(frozen=True)
class BucketLayout:
    """One bucket: its parameter group, its parameters' names and sizes (elements), elements per rank."""

    group: int
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    shard_size: int

    @property
    def num_elements(self) -> int:
        """Without the padding."""
        return sum(self.sizes)


@dataclass(frozen=True)
class ShardLayout:
    """All buckets, for one world size."""

    world_size: int
    buckets: tuple[BucketLayout, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> ShardLayout:
        buckets = tuple(
            BucketLayout(
                bucket["group"], tuple(bucket["names"]), tuple(bucket["sizes"]), bucket["shard_size"]
            )
            for bucket in content["buckets"]
        )
        return ShardLayout(content["world_size"], buckets)


def shard_size_of(num_elements: int, world_size: int) -> int:
    """Elements per rank: an equal share, rounded up to `SHARD_ALIGNMENT`."""
    unit = world_size * SHARD_ALIGNMENT
    return -(-num_elements // unit) * SHARD_ALIGNMENT


def consolidate(states: Sequence[StateDict]) -> ParameterStates:
    """Join the state dicts of all ranks (in the order of the ranks) into whole tensors per parameter.

    Raises:
        ValueError: a rank's state dict is missing, doubled, or belongs to another layout.
    """
    layout = ShardLayout.from_json(states[0]["layout"])
    found = [state["rank"] for state in states]
    if found != list(range(layout.world_size)):
        raise ValueError(f"need the state of ranks 0 to {layout.world_size - 1} in order, got {found}")
    if any(ShardLayout.from_json(state["layout"]) != layout for state in states):
        raise ValueError("the ranks' states have different layouts: they are not of one checkpoint")
    whole: ParameterStates = {name: {} for bucket in layout.buckets for name in bucket.names}
    for index, bucket in enumerate(layout.buckets):
        for key, value in states[0]["state"].get(str(index), {}).items():
            if value.ndim == 0:  # a step counter: the same on every rank, for every parameter of the bucket
                parts: Sequence[torch.Tensor] = [value] * len(bucket.names)
            else:
                full = torch.cat([state["state"][str(index)][key] for state in states])
                parts = full[: bucket.num_elements].split(bucket.sizes)
            for name, part in zip(bucket.names, parts, strict=True):
                whole[name][key] = part
    return whole


def take_shards(whole: ParameterStates, layout: ShardLayout, rank: int) -> dict[str, dict[str, torch.Tensor]]:
    """Cut whole per-parameter states into `rank`'s shards: bucket number (as text) -> state -> tensor.

    Raises:
        ValueError: parameters of the layout have no state while others of the same bucket do.
    """
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for index, bucket in enumerate(layout.buckets):
        states = [whole.get(name, {}) for name in bucket.names]
        keys = sorted({key for state in states for key in state})
        lacking = [name for name, state in zip(bucket.names, states, strict=True) if len(state) != len(keys)]
        if lacking:
            raise ValueError(f"no optimizer state for {', '.join(lacking)}")
        shards[str(index)] = {key: _cut([state[key] for state in states], bucket, rank) for key in keys}
    return shards


def _cut(parts: Sequence[torch.Tensor], bucket: BucketLayout, rank: int) -> torch.Tensor:
    if parts[0].ndim == 0:
        return parts[0].clone()
    padded = parts[0].new_zeros(max(bucket.num_elements, (rank + 1) * bucket.shard_size))
    torch.cat([part.reshape(-1) for part in parts], out=padded[: bucket.num_elements])
    return padded[rank * bucket.shard_size : (rank + 1) * bucket.shard_size].clone()
