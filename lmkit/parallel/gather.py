"""Gather the weights that other ranks updated: by the backend, or by reading the memory of their GPUs."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from lmkit.core.buckets import Work
from lmkit.errors import LmkitError
from lmkit.measure.allocator import without_expandable_segments
from lmkit.measure.memory import is_out_of_memory
from lmkit.parallel.collectives import Averager, Traffic
from lmkit.parallel.ranks import Ranks

ALIGNMENT = 512
"""Alignment of CUDA's allocators, in bytes."""
FIRST_TORCH = "2.11"
"""The symmetric-memory interface of earlier versions differs."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_USE_COLLECTIVES = 'set parallel.gather = "collective"'


class WeightGather:
    """Gather with one all-gather per tensor."""

    def __init__(self, averager: Averager) -> None:
        self._averager = averager

    def allocate(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a zeroed flat tensor (num_elements,). The world size divides it into equal parts."""
        return torch.zeros(num_elements, dtype=dtype, device=device)

    def start(self, flats: Sequence[torch.Tensor]) -> list[Work]:
        """Start collecting the other ranks' parts of tensors from `allocate`. Collective.

        Call it after this rank's parts are written (on GPUs: by kernels launched on the current stream).
        """
        return [self._averager.all_gather(flat) for flat in flats]


class PeerGather(WeightGather):
    """Read the other ranks' parts from the memory of their GPUs, on a separate stream.

    Copies take no SMs from the matrix products of the forward pass, as NCCL's kernels would.

    A rank may read only after every rank has written; a reduction of four bytes makes sure of it. A rank may write
    again only after every rank has read. Each rank reads a bucket's weights before it reduces the bucket's next
    gradients (`ShardedBucket.reduce`), and no rank updates a shard before that reduction has ended.
    """

    def __init__(self, memory: PeerMemory, ranks: Ranks, traffic: Traffic) -> None:
        self._memory = memory
        self._ranks = ranks
        self._traffic = traffic
        self._used_bytes = 0
        self._written = torch.zeros(1, device=ranks.device)
        # Tensor -> (this rank's copy, the source) of every other rank's part. The list starts at the next rank, so
        # that no two ranks read from the same rank at a time.
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

    def start(self, flats: Sequence[torch.Tensor]) -> list[Work]:
        self._traffic.count_all_reduce(self._written.nbytes, self._ranks.world_size)
        all_written = dist.all_reduce(self._written, async_op=True)
        arrivals: list[Work] = []
        with torch.cuda.stream(self._stream):
            all_written.wait()
            for flat in flats:
                self._traffic.count_scatter_or_gather(flat.nbytes, self._ranks.world_size)
                for copy, part in self._copies[flat]:
                    copy.copy_(part, non_blocking=True)
                arrivals.append(all_written if self._stream is None else self._stream.record_event())
        return arrivals


def aligned(num_bytes: int) -> int:
    """Return the bytes of a `PeerMemory` that a tensor of `num_bytes` takes."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class PeerMemory:
    """Map `num_bytes` of every rank's GPU into the address space of all ranks (symmetric memory). Collective.

    Views of this rank's memory, such as weights, may outlive this object. Once they are gone,
    `torch.cuda.empty_cache` frees the memory. PyTorch calls the interface alpha.

    Attributes:
        of_rank: every rank's memory, (num_bytes,) uint8 each; this rank's own is zeroed.

    Raises:
        LmkitError: the driver or the container does not let the processes share memory, or see `check_pairing`.
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
        """Make the current stream wait until every rank's stream reaches this call. Collective.

        Kernels after it see what every rank wrote before it. It is a kernel of one block, which takes the host less
        time than a collective of the backend.
        """
        self._shared.barrier()


def check_pairing(of_rank: list[torch.Tensor], ranks: Ranks) -> None:
    """Check that every rank sees in the memory of each other rank what its owner has just written. Collective.

    Nothing else would notice wrong pairing: ranks would go on training with stale weights.

    Raises:
        LmkitError: on every rank.
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
    """Return whether all ranks run on GPUs of one host with peer access. Collective; equal on every rank."""
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
