"""How `fsdp` gathers weights: by the backend, or by reading other ranks' shards from the memory of their GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from lmkit.core.buckets import Work
from lmkit.model.memory import SLOT_BYTES
from lmkit.parallel.collectives import Averager, Traffic, is_captured
from lmkit.parallel.gather import PeerMemory, aligned
from lmkit.parallel.ranks import Ranks


class ShardGather:
    """Gather with one all-gather."""

    def __init__(self, averager: Averager) -> None:
        self._averager = averager

    def reserve(self, num_bytes: int) -> None:
        """Prepare for shards of at most `num_bytes`, in the dtype of the gathered weights. Collective."""

    def collect(self, whole: torch.Tensor, shard: torch.Tensor) -> Work:
        """Start filling `whole` (world_size * n,) with all ranks' shards (n,), by an all-gather. Collective."""
        self._averager.own_part(whole).copy_(shard)
        return self._averager.all_gather(whole)

    start = collect
    """Fill `whole` as `collect` does, by the fastest way. Collective."""

    def end_step(self) -> None:
        """Let a graph gather next. Collective."""


class PeerShardGather(ShardGather):
    """Copy the other ranks' shards from the memory of their GPUs, on a separate stream.

    Copies take no SMs from concurrent kernels; NCCL's kernels do. But a barrier occupies part of an SM while it
    waits, so NCCL gathers large layers (`PEER_LAYER_BYTES`). Each rank first casts its shard to the dtype of the
    gathered weights, piece by piece, into two slots in turn that all ranks can read. A barrier after each piece shows
    that every rank has written its piece, and that every rank has read the piece before, whose slot is then free.
    """

    def __init__(self, averager: Averager, ranks: Ranks, traffic: Traffic) -> None:
        super().__init__(averager)
        self._ranks = ranks
        self._traffic = traffic
        self._stream = torch.cuda.Stream(ranks.device) if ranks.device.type == "cuda" else None
        # Whether a graph captures -> the next slot. A capture may fail on one rank only; its turns count apart.
        self._turns = {False: 0, True: 0}
        self._is_ended = True
        # Kept, because making views takes longer than copying.
        self._pieces: dict[tuple[torch.Tensor, int], list[Piece]] = {}

    def reserve(self, num_bytes: int) -> None:
        size = min(aligned(num_bytes), SLOT_BYTES)
        self._memory = PeerMemory(2 * size, self._ranks)
        self._slots = [[memory[turn * size :][:size] for memory in self._memory.of_rank] for turn in range(2)]

    @torch.no_grad()
    def start(self, whole: torch.Tensor, shard: torch.Tensor) -> Work:
        self._traffic.count_scatter_or_gather(whole.nbytes, self._ranks.world_size)
        captured = is_captured(whole.device)
        self._is_ended &= captured
        key = whole, self._turns[captured]
        if key not in self._pieces:
            self._pieces[key] = list(self._cut(whole, self._turns[captured], shard))
        pieces = self._pieces[key]
        self._turns[captured] = (self._turns[captured] + len(pieces)) % 2
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for piece in pieces:
                piece.slot.copy_(piece.mine)
                piece.own.copy_(piece.mine)
                self._memory.barrier()
                for part, slot in piece.others:
                    part.copy_(slot, non_blocking=True)
            return _Done() if self._stream is None else self._stream.record_event()

    def end_step(self) -> None:
        """Wait until every rank has read the last piece that was gathered without a graph: the first in a graph may
        take the same slot. Collective."""
        if self._is_ended:
            return
        self._is_ended = True
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._memory.barrier()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def _cut(self, whole: torch.Tensor, turn: int, shard: torch.Tensor) -> Iterator[Piece]:
        """Yield pieces as large as a slot, for both slots in turn."""
        world_size, rank = self._ranks.world_size, self._ranks.rank
        parts = whole.chunk(world_size)
        length = self._slots[0][0].nbytes // whole.itemsize
        for number, begin in enumerate(range(0, len(shard), length)):
            end = min(begin + length, len(shard))
            slots = [
                slot[: (end - begin) * whole.itemsize].view(whole.dtype)
                for slot in self._slots[(turn + number) % 2]
            ]
            others = [(rank + step) % world_size for step in range(1, world_size)]
            yield Piece(
                shard[begin:end],
                slots[rank],
                parts[rank][begin:end],
                [(parts[other][begin:end], slots[other]) for other in others],
            )


class Piece(NamedTuple):
    """A piece of this rank's shard, its slot, and its place in the whole; the place and slot of every other rank.

    The other ranks are listed from the next one on, so that no two ranks read from the same rank at a time.
    """

    mine: torch.Tensor
    slot: torch.Tensor
    own: torch.Tensor
    others: list[tuple[torch.Tensor, torch.Tensor]]


class _Done:
    """A finished copy: on a CPU, copies are synchronous."""

    def wait(self) -> None: ...
