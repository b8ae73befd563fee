"""Who am I among how many: ranks, their device, and the process group that joins them.

The settings come from the environment that `torchrun` (any rendezvous backend, one node or many) or
`lmkit.parallel.launch.spawn_ranks` gives its processes. A process without them is alone and needs no group.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from lmkit.errors import LmkitError, UsageError
from lmkit.measure.environment import LAUNCH_QUEUES_VARIABLE
from lmkit.parallel.meeting import RENDEZVOUS_VARIABLE, join_store

_LOOK_S = 0.02


@dataclass(frozen=True)
class Ranks:
    """This process's place: `rank` of `world_size`, `local_rank` on its machine, and its device."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (torch.device is immutable)
    timeout_s: float = 600.0
    store: dist.Store | None = field(default=None, repr=False, compare=False)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which alone speaks and writes files."""
        return self.rank == 0


@contextmanager
def process_group(
    device: str | torch.device = "auto", *, backend: str | None = None, timeout_s: float = 600.0
) -> Iterator[Ranks]:
    """Join the process group that the environment describes, and leave it on the way out.

    Args:
        device: "auto" (a GPU if there is one), "cpu", "cuda" (GPU number `local_rank`) or a full device.
        backend: of torch.distributed; None takes gloo on CPUs, and on GPUs NCCL (with gloo for CPU tensors).
        timeout_s: how long a rank waits for another, in a collective or at the start, before it gives up.

    Raises:
        UsageError: half an environment (RANK without MASTER_ADDR, say), or fewer GPUs than local ranks.
        LmkitError: the port is taken, or not every rank arrived in time.
    """
    settings = _read_environment()
    if settings.world_size == 1:
        yield Ranks(device=local_device(device, settings.local_rank), timeout_s=timeout_s)
        return
    _deepen_launch_queues()
    place = local_device(device, settings.local_rank)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    store = _meet(settings, timeout_s)
    timeout = timedelta(seconds=timeout_s)
    backend = backend or ("cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo")
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("collectives", store),
        rank=settings.rank,
        world_size=settings.world_size,
        timeout=timeout,
        pg_options=_collectives_first(timeout) if place.type == "cuda" and "nccl" in backend else None,
        device_id=place if place.type == "cuda" else None,
    )
    ranks = Ranks(
        rank=settings.rank,
        world_size=settings.world_size,
        local_rank=settings.local_rank,
        device=place,
        timeout_s=timeout_s,
        store=store,
    )
    try:
        yield ranks
    except BaseException:
        if place.type == "cuda" and dist.group.WORLD is not None:
            dist.group.WORLD.abort()  # kernels that wait for a lost rank would make a plain destroy wait too
        raise
    finally:
        dist.destroy_process_group()


def _deepen_launch_queues() -> None:
    """Let the host get 4,000 launches ahead of its GPU instead of 1,000, unless the environment says how many.

    The driver reads the variable when it starts, so this comes before the first question about GPUs. A rank whose
    host falls behind holds up all ranks, and the room is what a host can be slow for before its GPU runs dry: a step
    of 162 million parameters is 700 launches, so 1,000 are one step and a half.
    """
    os.environ.setdefault(LAUNCH_QUEUES_VARIABLE, "4x")


def _collectives_first(timeout: timedelta) -> Any:
    """NCCL's kernels on a stream of high priority.

    Otherwise one that is ready waits until the whole grid of a kernel that was launched before has been dealt out: on
    an H200 the last gradients of 1.3 billion weights left 0.8 ms late, behind an optimizer that did not need them.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # PyTorch warns where it differs
    return options


@dataclass(frozen=True)
class _Environment:
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    meeting: str | None = None


def _read_environment() -> _Environment:
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return _Environment()
    own = os.environ.get(RENDEZVOUS_VARIABLE)
    needed = ("RANK", "WORLD_SIZE") if own else ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in os.environ]
    if missing:
        given = next(name for name in ("RANK", "WORLD_SIZE") if name in os.environ)
        raise UsageError(
            f"environment: {given} is set but {', '.join(missing)} is not",
            hint="use torchrun (or --nproc N), which set all of them, or unset RANK and WORLD_SIZE",
        )
    rank, world_size = _integer("RANK"), _integer("WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise UsageError(
            f"environment: RANK={rank} does not fit WORLD_SIZE={world_size}",
            hint="use torchrun (or --nproc N), which set both",
        )
    if not own and not 0 <= _integer("MASTER_PORT") < 1 << 16:
        raise UsageError(
            f"environment: MASTER_PORT={os.environ['MASTER_PORT']} is not a port",
            hint="use torchrun, which sets it",
        )
    local_rank = _integer("LOCAL_RANK") if "LOCAL_RANK" in os.environ else rank
    return _Environment(rank, world_size, local_rank, own)


def _integer(name: str) -> int:
    text = os.environ[name]
    if not text.isdecimal():
        raise UsageError(f"environment: {name}={text!r} is not a number", hint="use torchrun, which sets it")
    return int(text)


def local_device(device: str | torch.device, local_rank: int) -> torch.device:
    """The device of a rank; see `process_group`.

    Raises:
        UsageError: it asks for a GPU that is not there.
    """
    if str(device) == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.device(device)
    if place.type != "cuda":
        return place
    count = torch.cuda.device_count()
    index = local_rank if place.index is None else place.index
    if not count:
        raise UsageError(
            "device: cuda was asked for, and this machine shows no GPU",
            hint="take the CPU with --device cpu (benches: --set run.device=cpu), or auto, which looks",
        )
    if index >= count:
        raise UsageError(
            f"device: local rank {local_rank} asks for GPU {index}, and this machine shows {count}",
            hint="start at most one rank per GPU, or set the device to cpu",
        )
    return torch.device("cuda", index)


def _meet(settings: _Environment, timeout_s: float) -> dist.Store:
    """Open the store that all ranks share: torchrun's, or the one of `spawn_ranks`."""
    where = os.environ.get("MASTER_ADDR", "") + ":" + os.environ.get("MASTER_PORT", "")
    timeout = timedelta(seconds=timeout_s)
    try:
        if settings.meeting is not None:
            store = join_store(settings.meeting, timeout_s)
        else:
            rendezvous_of_env = rendezvous("env://", settings.rank, settings.world_size, timeout=timeout)
            store, _, _ = next(iter(rendezvous_of_env))
    except dist.DistError as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error):
            raise LmkitError(
                f"rank {settings.rank}: the port of {where} is taken",
                hint="choose another --master-port, or let torchrun find one with --standalone",
            ) from error
        raise LmkitError(
            f"rank {settings.rank}: no meeting of {settings.world_size} ranks within {timeout_s:g} s",
            hint="check that every rank was started, with the same address, port and world size",
        ) from error
    store.set_timeout(timeout)
    _await_all(store, settings, timeout_s)
    return store


def let_go_of_collectives(ranks: Ranks) -> None:
    """Return when the backend holds no tensor of a collective that has ended. A collective itself; call it after a
    synchronisation.

    NCCL's keeps them until a thread of its own has looked, which it does ten times a second, and where only the
    collective's future was waited for, as PyTorch's DDP does, until the next collective: an account of memory that
    begins sooner has what others worked on in it, and then loses it.
    """
    if ranks.world_size > 1 and ranks.device.type == "cuda" and "nccl" in str(dist.get_backend_config()):
        assert dist.group.WORLD is not None
        dist.group.WORLD._wait_for_pending_works()  # the thread puts the tensors aside ...
        dist.all_reduce(torch.zeros(1, device=ranks.device))  # ... and the next collective drops them
        torch.cuda.synchronize(ranks.device)


def _await_all(store: dist.Store, settings: _Environment, timeout_s: float) -> None:
    """Wait for every rank's sign, so that a rank that never came is named."""
    store.set(f"here/{settings.rank}", "yes")
    absent = absent_ranks(store, "here", settings.world_size, timeout_s)
    if absent:
        raise LmkitError(
            f"rank {settings.rank}: rank {', '.join(map(str, absent))} did not come within {timeout_s:g} s",
            hint="look for that rank's own error; every rank must be started",
        )


def absent_ranks(store: dist.Store, sign: str, world_size: int, patience_s: float) -> list[int]:
    """The ranks that have not set `<sign>/<rank>` in the store within `patience_s`.

    It looks now and then, because no signal reaches a rank that waits inside the store.

    Raises:
        torch.distributed.DistNetworkError: the store itself is gone.
    """
    deadline = time.monotonic() + patience_s
    absent = list(range(world_size))
    while True:
        absent = [rank for rank in absent if not store.check([f"{sign}/{rank}"])]
        if not absent or time.monotonic() > deadline:
            return absent
        time.sleep(_LOOK_S)
