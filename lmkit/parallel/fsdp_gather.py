"""How `fsdp` gathers weights: by the backend, or by reading other ranks' shards from the memory of their GPUs."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lmkit.model.memory import SLOT_BYTES
from lmkit.parallel.collectives import Averager, Traffic, Work
from lmkit.parallel.gather import PeerMemory, aligned
from lmkit.parallel.ranks import Ranks


class ShardGather:
    """Gather with one all-gather."""

    def __init__(self, averager: Averager) -> None:
        self._averager = averager

    def reserve(self, num_bytes: int) -> None:
        """Prepare for shards of at most so many bytes, in the dtype of the gathered weights. Collective."""

    def collect(self, whole: torch.Tensor, shard: torch.Tensor) -> Work:
        """Start filling `whole` (world_size * n,) with all ranks' shards (n,), by an all-gather. Collective."""
        self._averager.own_part(whole).copy_(shard)
        return self._averager.all_gather(whole)

    start = collect
    """The same, the fastest way."""


class PeerShardGather(ShardGather):
    """Copy the other ranks' shards from the memory of their GPUs, on a separate stream.

    Copies take no SMs from the matrix products beside them, as NCCL's kernels do. A shard is first written, in the
    dtype of the gathered weights, to slots that all ranks see: piece by piece, to two slots in turn. A reduction of
    four bytes then tells that all ranks have written theirs. It tells, too, that all have read the slots of the piece
    before, which the next piece is written to.
    """

    def __init__(self, averager: Averager, ranks: Ranks, traffic: Traffic) -> None:
        super().__init__(averager)
        self._ranks = ranks
        self._traffic = traffic
        self._written = torch.zeros(1, device=ranks.device)
        self._stream = torch.cuda.Stream(ranks.device) if ranks.device.type == "cuda" else None
        self._turn = 0

    def reserve(self, num_bytes: int) -> None:
        size = min(aligned(num_bytes), SLOT_BYTES)
        of_rank = PeerMemory(2 * size, self._ranks).of_rank
        self._slots = [[memory[turn * size :][:size] for memory in of_rank] for turn in range(2)]

    @torch.no_grad()
    def start(self, whole: torch.Tensor, shard: torch.Tensor) -> Work:
        self._traffic.count_scatter_or_gather(whole.nbytes, self._ranks.world_size)
        parts = whole.chunk(self._ranks.world_size)
        length = self._slots[0][0].nbytes // whole.itemsize
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for begin in range(0, len(shard), length):
                piece = slice(begin, min(begin + length, len(shard)))
                written = self._exchange([part[piece] for part in parts], shard[piece])
            return written if self._stream is None else self._stream.record_event()

    def _exchange(self, parts: list[torch.Tensor], mine: torch.Tensor) -> Work:
        world_size, rank = self._ranks.world_size, self._ranks.rank
        slots = [slot[: parts[rank].nbytes].view(parts[rank].dtype) for slot in self._slots[self._turn]]
        self._turn = 1 - self._turn
        self._traffic.count_all_reduce(self._written.nbytes, world_size)
        slots[rank].copy_(mine)
        all_written: Work = dist.all_reduce(self._written, async_op=True)
        parts[rank].copy_(mine)
        all_written.wait()
        for step in range(1, world_size):  # all ranks read from different ones at a time
            other = (rank + step) % world_size
            parts[other].copy_(slots[other], non_blocking=True)
        return all_written
