"""Gather weights: by the backend, or by reading the memory of other ranks' GPUs; and between which ranks."""

from __future__ import annotations

import functools
import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from lmkit.core.buckets import PendingMean, Work
from lmkit.errors import LmkitError
from lmkit.measure.memory import is_out_of_memory, without_expandable_segments
from lmkit.model.memory import SLOT_BYTES
from lmkit.parallel.collectives import Averager, Traffic, is_captured
from lmkit.parallel.ranks import Ranks
from lmkit.recipe.tables import ParallelConfig

ALIGNMENT = 512
"""Alignment of CUDA's allocators, in bytes."""
FIRST_TORCH = "2.11"
"""The symmetric-memory interface of earlier versions differs."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_USE_COLLECTIVES = 'set parallel.gather = "collective"'


class Gather:
    """Gather with one all-gather per tensor. `zero1` allocates and refills weights, `fsdp` fills them from shards."""

    def __init__(self, averager: Averager) -> None:
        self._averager = averager
        self._ranks = averager.ranks
        # From this rank on, so that no two ranks read from the same rank at a time.
        self._ring = [*range(averager.ranks.rank, averager.ranks.world_size), *range(averager.ranks.rank)]

    def allocate(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a zeroed flat tensor (num_elements,). The world size divides it into equal parts."""
        return torch.zeros(num_elements, dtype=dtype, device=device)

    def refill(self, flats: Sequence[torch.Tensor]) -> list[Work]:
        """Start collecting the other ranks' parts of tensors from `allocate`; this rank's are written. Collective."""
        return [self._averager.all_gather(flat) for flat in flats]

    def reserve(self, num_bytes: int) -> None:
        """Prepare for shards of at most `num_bytes`, in the dtype of the gathered weights. Collective."""

    def collect(self, whole: torch.Tensor, shard: torch.Tensor) -> Work:
        """Start filling `whole` (world_size * n,) with all ranks' shards (n,), by an all-gather. Collective."""
        self._ranks.own_part(whole).copy_(shard)
        return self._averager.all_gather(whole)

    start = collect
    """Fill `whole` as `collect` does, by the fastest way. Collective."""

    def end_step(self) -> None:
        """Let a graph gather next. Collective."""


class PeerGather(Gather):
    """Read the other ranks' parts from the memory of their GPUs, on a separate stream, without taking SMs.

    A rank may read only after every rank has written; a reduction of four bytes makes sure of it. A rank may write
    again only after every rank has read: each reads a bucket's weights before it reduces the bucket's next gradients
    (`KeptShards.reduce`), and no rank updates a shard before that reduction has ended.

    Args:
        num_bytes: of all tensors that will be allocated, each `aligned`.
    """

    def __init__(self, averager: Averager, num_bytes: int) -> None:
        super().__init__(averager)
        self._memory = PeerMemory(num_bytes, self._ranks)
        self._used_bytes = 0
        self._written = torch.zeros(1, device=self._ranks.device)
        # Tensor -> (this rank's copy, the source) of every other rank's part
        self._copies: dict[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._stream = _stream_of(self._ranks)

    def allocate(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        taken = slice(self._used_bytes, self._used_bytes + num_elements * dtype.itemsize)
        self._used_bytes += aligned(num_elements * dtype.itemsize)
        flats = [memory[taken].view(dtype) for memory in self._memory.of_rank]
        seen = [flat.chunk(len(flats)) for flat in flats]
        own = flats[self._ranks.rank]
        self._copies[own] = [(seen[self._ranks.rank][other], seen[other][other]) for other in self._ring[1:]]
        return own

    def refill(self, flats: Sequence[torch.Tensor]) -> list[Work]:
        traffic, world_size = self._averager.traffic, self._ranks.world_size
        traffic.count(self._written.nbytes, world_size, passes=2)
        all_written = dist.all_reduce(self._written, async_op=True)
        arrivals: list[Work] = []
        with torch.cuda.stream(self._stream):
            all_written.wait()
            for flat in flats:
                traffic.count(flat.nbytes, world_size)
                for copy, part in self._copies[flat]:
                    copy.copy_(part, non_blocking=True)
                arrivals.append(all_written if self._stream is None else self._stream.record_event())
        return arrivals


class PeerShardGather(Gather):
    """Copy the other ranks' shards from the memory of their GPUs, on a separate stream.

    A barrier occupies part of an SM while it waits, so NCCL gathers large layers (`PEER_LAYER_BYTES`). Each rank
    first casts its shard to the dtype of the gathered weights, piece by piece, into two slots in turn that all ranks
    can read. A barrier after each piece shows that every rank has written it and has read the piece before.
    """

    def __init__(self, averager: Averager) -> None:
        super().__init__(averager)
        self._stream = _stream_of(self._ranks)
        # Whether a graph captures -> the next slot. A capture may fail on one rank only; its turns count apart.
        self._turns = {False: 0, True: 0}
        self._is_ended = True
        # Kept, because making views takes longer than copying.
        self._pieces: dict[tuple[torch.Tensor, int], list[SlotCopies]] = {}

    def reserve(self, num_bytes: int) -> None:
        size = min(aligned(num_bytes), SLOT_BYTES)
        self._memory = PeerMemory(2 * size, self._ranks)
        self._slots = [[memory[turn * size :][:size] for memory in self._memory.of_rank] for turn in range(2)]

    @torch.no_grad()
    def start(self, whole: torch.Tensor, shard: torch.Tensor) -> Work:
        self._averager.traffic.count(whole.nbytes, self._ranks.world_size)
        captured = is_captured(whole.device)
        self._is_ended &= captured
        key = whole, self._turns[captured]
        if key not in self._pieces:
            self._pieces[key] = self._cut(whole, self._turns[captured], shard)
        pieces = self._pieces[key]
        self._turns[captured] = (self._turns[captured] + len(pieces)) % 2
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for mine, ((own_slot, own), *others) in pieces:
                own_slot.copy_(mine)
                own.copy_(mine)
                self._memory.barrier()
                for slot, part in others:
                    part.copy_(slot, non_blocking=True)
            return PendingMean([], []) if self._stream is None else self._stream.record_event()

    def end_step(self) -> None:
        """Wait until every rank has read the last piece: the first in a graph may take the same slot. Collective."""
        if self._is_ended:
            return
        self._is_ended = True
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._memory.barrier()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def _cut(self, whole: torch.Tensor, turn: int, shard: torch.Tensor) -> list[SlotCopies]:
        """Return pieces as large as a slot, for both slots in turn."""
        parts = whole.chunk(self._ranks.world_size)
        length = self._slots[0][0].nbytes // whole.itemsize
        pieces = []
        for number, begin in enumerate(range(0, len(shard), length)):
            mine, slots = shard[begin : begin + length], self._slots[(turn + number) % 2]
            views = [slot[: len(mine) * whole.itemsize].view(whole.dtype) for slot in slots]
            copies = [(views[other], parts[other][begin : begin + length]) for other in self._ring]
            pieces.append((mine, copies))
        return pieces


SlotCopies = tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]
"""A piece of this rank's shard; the slot and the place in the whole of every rank's piece, this rank's first."""


def _stream_of(ranks: Ranks) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(ranks.device) if ranks.device.type == "cuda" else None


class Links(NamedTuple):
    """How a rank communicates with the `ranks` that share its copy of the model, its place among them.

    Attributes:
        gathers: collects shards; None if this rank is alone.
        reductions: reduces gradients; None if this rank is alone or its gradients are already averaged.
        replicas: averages among the ranks that keep the same shard of other copies; None if there is one copy.
    """

    ranks: Ranks
    gathers: Gather | None = None
    reductions: Averager | None = None
    replicas: Averager | None = None


def link(ranks: Ranks, within: Ranks, traffic: Traffic, *, reads_peers: bool) -> Links:
    """Return this rank's links under `fsdp`, with its place `within` the consecutive ranks that share its copy of the
    model; it reads peers only where all ranks share one. Collective."""
    groups = _groups(dist.group.WORLD, within.world_size, ranks.timeout_s)
    replicas = None
    if within.world_size < ranks.world_size:
        copies = ranks.world_size // within.world_size
        across = replace(within, rank=ranks.rank // within.world_size, world_size=copies)
        replicas = Averager(across, traffic, groups["replicas"])
    averager = Averager(within, traffic, groups["gathers"])
    gathers = PeerShardGather(averager) if reads_peers else Gather(averager)
    return Links(within, gathers, Averager(within, traffic, groups["reductions"]), replicas)


@functools.lru_cache(maxsize=1)
def _groups(world: dist.ProcessGroup, count: int, timeout_s: float) -> dict[str, Any]:
    """Return this rank's groups: two of the `count` ranks that share a copy, one of the ranks with the same shard.
    Collective."""
    ranks = list(range(world.size()))
    copies = [ranks[start : start + count] for start in range(0, len(ranks), count)]
    members = {"reductions": copies}
    found: dict[str, Any] = {"gathers": None}  # the default group
    if len(copies) > 1:
        members |= {"gathers": copies, "replicas": [ranks[index::count] for index in range(count)]}
    for name, groups in members.items():  # every rank takes part in making each group
        found[name], _ = dist.new_subgroups_by_enumeration(groups, timeout=timedelta(seconds=timeout_s))
    return found


def reads_peers(parameters: Iterable[torch.Tensor], ranks: Ranks, config: ParallelConfig) -> bool:
    """Return whether weights are copied from the memory of other GPUs. Collective; equal on every rank."""
    on_one_device = {parameter.device for parameter in parameters} == {ranks.device}
    return config.gather == "auto" and on_one_device and can_share_memory(ranks)


def aligned(num_bytes: int) -> int:
    """Return the bytes of a `PeerMemory` that a tensor of `num_bytes` takes."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class PeerMemory:
    """Map `num_bytes` of every rank's GPU into the address space of all ranks (symmetric memory). Collective.

    Views of this rank's memory may outlive this object. `torch.cuda.empty_cache` frees the memory after them.

    Attributes:
        of_rank: every rank's memory, (num_bytes,) uint8 each; this rank's own is zeroed.

    Raises:
        LmkitError: the processes cannot share memory, or see `check_pairing`.
    """

    def __init__(self, num_bytes: int, ranks: Ranks) -> None:
        from torch.distributed import _symmetric_memory as symmetric_memory

        assert dist.group.WORLD is not None
        try:
            # A pool of our own, so that `memory_allocated` and the peaks of the benches include this memory. The
            # process-wide pool of PyTorch reuses freed pieces together with their pairing between ranks: ranks that
            # freed pieces at different times would be paired with wrong pieces.
            allocator = symmetric_memory.get_mempool_allocator(ranks.device)
            self._pool = torch.cuda.MemPool(allocator, use_on_oom=False, no_split=True)
            with without_expandable_segments(), torch.cuda.use_mem_pool(self._pool):
                own = torch.zeros(num_bytes, dtype=torch.uint8, device=ranks.device)
            self._shared = symmetric_memory.rendezvous(own, dist.group.WORLD)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise torch.OutOfMemoryError(str(error)) from error
            raise LmkitError(
                "parallel.peer_memory_unavailable",
                f"rank {ranks.rank}: the GPUs cannot share memory: {str(error).partition(chr(10))[0]}",
                hint=_USE_COLLECTIVES,
            ) from error
        self.of_rank = [
            own if rank == ranks.rank else self._shared.get_buffer(rank, (num_bytes,), torch.uint8)
            for rank in range(ranks.world_size)
        ]
        check_pairing(self.of_rank, ranks)

    def barrier(self) -> None:
        """Make the current stream wait until every rank's stream reaches this call. Collective."""
        self._shared.barrier()


def check_pairing(of_rank: list[torch.Tensor], ranks: Ranks) -> None:
    """Raise an LmkitError on every rank unless all see in each other's memory what its owner has just written.

    Nothing else would notice that ranks train with stale weights. Collective.
    """
    mine = secrets.token_bytes(8)
    of_rank[ranks.rank][:8] = torch.tensor(list(mine), dtype=torch.uint8)
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)  # written before the other ranks are told
    written: list[bytes] = [b""] * ranks.world_size
    dist.all_gather_object(written, mine)
    seen = [bytes(memory[:8].clone().tolist()) for memory in of_rank]
    right = [False] * ranks.world_size
    dist.all_gather_object(right, seen == written)
    of_rank[ranks.rank][:8] = 0
    if not all(right):
        raise LmkitError(
            "parallel.peer_memory_mixed_up",
            f"rank {ranks.rank}: the ranks see different pieces of one another's GPU memory",
            hint=_USE_COLLECTIVES,
        )


def can_share_memory(ranks: Ranks) -> bool:
    """Return whether all ranks run on GPUs of one host with peer access. Collective."""
    if ranks.device.type != "cuda" or TorchVersion(torch.__version__) < FIRST_TORCH:
        return False
    boot = _BOOT_ID.read_text() if _BOOT_ID.exists() else ""
    # Device indices mean the same in all processes only if all see the same devices.
    mine = (boot, os.environ.get("CUDA_VISIBLE_DEVICES"), ranks.device.index)
    everyone: list[tuple] = [()] * ranks.world_size
    dist.all_gather_object(everyone, mine)
    indices = [index for _, _, index in everyone]
    return (
        bool(boot)
        and len({place[:2] for place in everyone}) == 1
        and len(set(indices)) == ranks.world_size
        and all(torch.cuda.can_device_access_peer(a, b) for a in indices for b in indices if a != b)
    )
