"""Memory that the GPUs of one host read from one another, without a kernel on either side."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from lmkit.errors import LmkitError
from lmkit.measure.memory import is_out_of_memory
from lmkit.parallel.process_group import Ranks

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
FIRST_TORCH = "2.11"  # PyTorch's interface before that is another, and was not tried


class PeerMemory:
    """`num_bytes` on every rank's GPU, which all ranks have in their address space (PyTorch's symmetric memory).

    A copy from another rank's memory is done by a copy engine: it moves 370 GB/s over NVLink on an H200 and holds no
    multiprocessor, where NCCL's kernels hold some 24. Making one is collective. PyTorch calls the interface alpha.
    What was cut from this rank's memory, such as weights, may outlive this object; then the next
    `torch.cuda.empty_cache` after its end gives the memory back.

    Attributes:
        of_rank: the memory of every rank as it is seen from here, (num_bytes,) uint8 each. This rank's is zeroed.

    Raises:
        LmkitError: the driver or the container does not let the processes share memory, or see `check_pairing`.
    """

    def __init__(self, num_bytes: int, ranks: Ranks) -> None:
        from torch.distributed import _symmetric_memory as symmetric_memory

        assert dist.group.WORLD is not None
        try:
            # A pool, so that `memory_allocated` and the peaks of the benches include it; with the settings of
            # PyTorch's pool for all of a process, but not that one: it hands freed memory out again, with what that
            # was shared with, and ranks that freed theirs at different times would see different pieces.
            allocator = symmetric_memory.get_mempool_allocator(ranks.device)
            self._pool = torch.cuda.MemPool(allocator, use_on_oom=False, no_split=True)
            with torch.cuda.use_mem_pool(self._pool):
                own = torch.zeros(num_bytes, dtype=torch.uint8, device=ranks.device)
            shared = symmetric_memory.rendezvous(own, dist.group.WORLD)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise torch.OutOfMemoryError(str(error)) from error
            raise LmkitError(
                f"rank {ranks.rank}: the GPUs cannot share memory: {str(error).partition(chr(10))[0]}",
                hint='set parallel.gather = "collective"',
            ) from error
        self.of_rank = [
            own if rank == ranks.rank else shared.get_buffer(rank, (num_bytes,), torch.uint8)
            for rank in range(ranks.world_size)
        ]
        check_pairing(self.of_rank, ranks)


def check_pairing(of_rank: list[torch.Tensor], ranks: Ranks) -> None:
    """Refuse memory in which a rank does not see what the owners have just written into theirs. Collective.

    Nothing else would tell: ranks would train on with one another's old weights. `PeerMemory` takes care that it does
    not happen, on an interface that may change.

    Raises:
        LmkitError: on every rank.
    """
    mine = secrets.token_bytes(8)
    of_rank[ranks.rank][:8] = torch.tensor(list(mine), dtype=torch.uint8)
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)  # it is written when the others are told of it
    written: list[bytes] = [b""] * ranks.world_size
    dist.all_gather_object(written, mine)
    seen = [bytes(memory[:8].clone().tolist()) for memory in of_rank]
    right = [False] * ranks.world_size
    dist.all_gather_object(right, seen == written)
    of_rank[ranks.rank][:8] = 0
    if not all(right):
        raise LmkitError(
            f"rank {ranks.rank}: the ranks see different pieces of one another's GPU memory",
            hint='set parallel.gather = "collective"',
        )


def can_share_memory(ranks: Ranks) -> bool:
    """Whether all ranks run on GPUs of one host that reach one another. Collective; the same on every rank."""
    if ranks.device.type != "cuda" or TorchVersion(torch.__version__) < FIRST_TORCH:
        return False
    boot = _BOOT_ID.read_text() if _BOOT_ID.exists() else ""
    # Device numbers mean the same in all processes only if they see the same devices.
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
