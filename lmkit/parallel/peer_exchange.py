"""Shards exchanged by reading them where they lie, in the other GPUs' memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from lmkit.parallel.peer_memory import PeerMemory, aligned
from lmkit.parallel.peer_signals import PeerSignals
from lmkit.parallel.process_group import Ranks
from lmkit.parallel.shard_exchange import Arrival, PendingShard
from lmkit.parallel.traffic import Traffic


class PeerExchange:
    """Copies the other ranks' parts on a stream of its own. Gradients are added up by the owner of the shard, in
    float32 and in the order of the ranks.

    A backend's kernels take multiprocessors from the products that they run beside, and a product that has a block of
    threads for each then needs a second round. Copy engines take none, and nor does waiting (see `PeerSignals`).

    A rank may read when every rank has written: it awaits their signals. It may write again when every rank has read,
    which other signals say already. Its weights have been read when the others announce the gradients of the same
    bucket (`ShardedBucket.reduce` sees to that), without which it does not step. Its gradients have been read when the
    others announce the weights that they stepped with them, which it awaits before it packs the next ones. Where no
    step follows (all ranks dropped the gradients), what is overwritten is not wanted.
    """

    def __init__(self, memory: PeerMemory, signals: PeerSignals, ranks: Ranks, traffic: Traffic) -> None:
        self._memory = memory
        self._signals = signals
        self._ranks = ranks
        self._traffic = traffic
        self._used_bytes = 0
        # Of every tensor, from whom to read what: the others' parts of weights; of gradients, this rank's from all.
        self._theirs: dict[torch.Tensor, list[tuple[int, torch.Tensor]]] = {}
        self._channel: dict[torch.Tensor, int] = {}
        self._stream = torch.cuda.Stream(ranks.device) if ranks.device.type == "cuda" else None

    def weights(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        seen = self._cut(num_elements, dtype)
        own = seen[self._ranks.rank]
        self._theirs[own] = [(rank, self._part(seen[rank], rank)) for rank in self._others()]
        return own

    def gradients(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        seen = self._cut(num_elements, dtype)
        own = seen[self._ranks.rank]
        everyone = [*self._others(), self._ranks.rank]
        self._theirs[own] = [(rank, self._part(seen[rank], self._ranks.rank)) for rank in everyone]
        return own

    def start_mean(self, flat: torch.Tensor) -> PendingShard:
        self._traffic.count_scatter_or_gather(flat.nbytes, self._ranks.world_size)
        world_size = self._ranks.world_size
        parts = torch.empty(world_size, flat.numel() // world_size, dtype=flat.dtype, device=flat.device)
        with self._when_announced(self._channel[flat]):
            for rank, theirs in self._theirs[flat]:
                parts[rank].copy_(theirs, non_blocking=True)
            return _PartsArrive(parts, self._stream)

    def start_gather(self, flats: Sequence[torch.Tensor]) -> list[Arrival]:
        arrivals: list[Arrival] = []
        with self._when_announced(self._channel[flats[0]]):
            for flat in flats:
                self._traffic.count_scatter_or_gather(flat.nbytes, self._ranks.world_size)
                for rank, theirs in self._theirs[flat]:
                    self._part(flat, rank).copy_(theirs, non_blocking=True)
                arrivals.append(_CopiesDone(self._stream))
        return arrivals

    @contextmanager
    def _when_announced(self, channel: int) -> Iterator[None]:
        """What is launched inside runs when all ranks' streams have come here."""
        self._signals.announce(channel)
        if self._stream is not None:
            self._stream.wait_stream(
                torch.cuda.current_stream()
            )  # it may still use what will be written here
        with torch.cuda.stream(self._stream):
            self._signals.await_others(channel)
            yield

    def _cut(self, num_elements: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """A tensor of its own in every rank's memory, as this rank sees them."""
        start = self._used_bytes
        self._used_bytes += aligned(num_elements * dtype.itemsize)
        seen = [
            bytes_of_rank[start : start + num_elements * dtype.itemsize].view(dtype)
            for bytes_of_rank in self._memory.of_rank
        ]
        self._channel[seen[self._ranks.rank]] = len(self._channel)
        return seen

    def _others(self) -> list[int]:
        """From the next one on, so that all read from different ones."""
        world_size, rank = self._ranks.world_size, self._ranks.rank
        return [(rank + step) % world_size for step in range(1, world_size)]

    def _part(self, flat: torch.Tensor, rank: int) -> torch.Tensor:
        return flat.chunk(self._ranks.world_size)[rank]


class _CopiesDone:
    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._event = None if stream is None else stream.record_event()

    def wait(self) -> None:
        if self._event is not None:
            self._event.wait()


class _PartsArrive(_CopiesDone):
    """`parts` (world_size, n), each of another rank."""

    def __init__(self, parts: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        super().__init__(stream)
        self._parts = parts

    def wait(self) -> list[torch.Tensor]:  # type: ignore[override]
        super().wait()
        wide = torch.promote_types(self._parts.dtype, torch.float32)
        return [self._parts.mean(0, dtype=wide)]

    def abandon(self) -> None:
        super().wait()  # the memory is given back in the order of the current stream
