"""How every rank gets the weights that the others have stepped: by the backend's all-gather, or by reading them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from lmkit.parallel.peer_memory import PeerMemory
from lmkit.parallel.process_group import Ranks
from lmkit.parallel.reduction import Averager
from lmkit.parallel.traffic import Traffic

ALIGNMENT = 512  # bytes; what CUDA's allocators give


class Arrival(Protocol):
    def wait(self) -> object:
        """On return (on GPUs: for the current stream) the tensor is whole."""


class WeightGather(Protocol):
    def allocate(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A zeroed flat tensor, (num_elements,), a multiple of the world size: of equal parts, one a rank."""

    def start(self, flats: Sequence[torch.Tensor]) -> list[Arrival]:
        """Start collecting the other ranks' parts of tensors that were allocated here. Every rank calls it for the
        same tensors, when it has written its own parts (on GPUs: launched that on the current stream)."""


class CollectiveGather:
    """One all-gather a tensor."""

    def __init__(self, averager: Averager) -> None:
        self._averager = averager

    def allocate(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(num_elements, dtype=dtype, device=device)

    def start(self, flats: Sequence[torch.Tensor]) -> list[Arrival]:
        return [self._averager.all_gather(flat) for flat in flats]


class PeerGather:
    """Reads the other ranks' parts where they lie, on a stream of its own.

    NCCL's kernels take multiprocessors from the products that they run beside, and a product that has a block of
    threads for each then needs a second round. Copy engines take none, which shows where gathering reaches into the
    forward pass: 1% of a step of 1.3 billion fp32 weights on two H200, 0.4% with bf16 weights, none at 162 million.

    A rank may read when every rank has written: all join a reduction of four bytes first. A rank may write again
    when every rank has read: each averages a bucket's next gradients only after it has read the bucket's weights
    (`ShardedBucket.reduce` sees to that), and no rank steps a shard before all have.
    """

    def __init__(self, memory: PeerMemory, ranks: Ranks, traffic: Traffic) -> None:
        self._memory = memory
        self._ranks = ranks
        self._traffic = traffic
        self._used_bytes = 0
        self._written = torch.zeros(1, device=ranks.device)
        # Of every tensor (this rank's copy of a part, the part) for the other ranks, from the next one on, so that
        # all read from different ones.
        self._copies: dict[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._stream = torch.cuda.Stream(ranks.device) if ranks.device.type == "cuda" else None

    def allocate(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        start = self._used_bytes
        self._used_bytes += aligned(num_elements * dtype.itemsize)
        world_size, rank = self._ranks.world_size, self._ranks.rank
        seen = [
            bytes_of_rank[start : start + num_elements * dtype.itemsize].view(dtype)
            for bytes_of_rank in self._memory.of_rank
        ]
        own = seen[rank]
        others = [(rank + step) % world_size for step in range(1, world_size)]
        self._copies[own] = [(own.chunk(world_size)[r], seen[r].chunk(world_size)[r]) for r in others]
        return own

    def start(self, flats: Sequence[torch.Tensor]) -> list[Arrival]:
        self._traffic.count_all_reduce(self._written.nbytes, self._ranks.world_size)
        all_written = dist.all_reduce(self._written, async_op=True)
        arrivals: list[Arrival] = []
        with torch.cuda.stream(self._stream):
            all_written.wait()
            for flat in flats:
                self._traffic.count_scatter_or_gather(flat.nbytes, self._ranks.world_size)
                for copy, part in self._copies[flat]:
                    copy.copy_(part, non_blocking=True)
                arrivals.append(_CopiesDone(self._stream))
        return arrivals


class _CopiesDone:
    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._event = None if stream is None else stream.record_event()

    def wait(self) -> None:
        if self._event is not None:
            self._event.wait()


def aligned(num_bytes: int) -> int:
    """What `num_bytes` take in a `PeerMemory`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
