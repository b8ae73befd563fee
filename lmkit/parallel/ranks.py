"""Ranks: which process this is among how many, on which device, and the process group that joins them.

The settings come from the environment that `torchrun` or `lmkit.parallel.launch.spawn_ranks` gives its processes. A
process without them is alone and needs no group.

A rank that dies or hangs becomes an error that names the rank and the step, within the timeout. With gloo, a broken
or late collective raises in the caller, and the survivors ask the store which ranks are alive. With NCCL, the caller
only waits for the GPU, so a thread watches the clock instead.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from lmkit.errors import LmkitError, UsageError
from lmkit.measure.environment import LAUNCH_QUEUES_VARIABLE
from lmkit.parallel.place import read_place

_POLL_S = 0.02
_graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()


@dataclass(frozen=True)
class Ranks:
    """This process's `rank` of `world_size`, and device."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (torch.device is immutable)
    timeout_s: float = 600.0
    store: dist.Store | None = field(default=None, repr=False, compare=False)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the only rank that prints and writes shared files."""
        return self.rank == 0

    def own_part(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this rank's part (n,) of `flat` (world_size * n,), a view."""
        return flat.chunk(self.world_size)[self.rank]

    @staticmethod
    def current(otherwise: str = "cpu") -> Ranks:
        """Return the place in torch.distributed's default group; its device is the current GPU if it uses NCCL.

        Without a group: a single rank on the device `otherwise`, as `process_group` takes it.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return Ranks(device=local_device(otherwise, local_rank=0))
        has_nccl = "nccl" in str(dist.get_backend_config())
        device = torch.device("cuda", torch.cuda.current_device()) if has_nccl else torch.device("cpu")
        store = dist.distributed_c10d._get_default_store()
        return Ranks(dist.get_rank(), dist.get_world_size(), device, store=store)


@contextmanager
def process_group(
    device: str | torch.device = "auto", *, backend: str | None = None, timeout_s: float = 600.0
) -> Iterator[Ranks]:
    """Join the process group that the environment describes, and leave it at the end of the block.

    Args:
        device: "auto" (a GPU if there is one), "cpu", "cuda" (GPU number `local_rank`) or a full device.
        backend: of torch.distributed; None uses gloo on CPUs, and on GPUs NCCL (with gloo for CPU tensors).
        timeout_s: how long a rank waits for another, in a collective or at the start, before it gives up.

    Raises:
        UsageError: half an environment (RANK without MASTER_ADDR, say), or fewer GPUs than local ranks.
        LmkitError: the port is taken, or not every rank arrived in time.
    """
    rank, world_size, local_rank = read_place()
    if world_size == 1:
        yield Ranks(device=local_device(device, local_rank), timeout_s=timeout_s)
        return
    # Let the host run 4,000 launches ahead of its GPU instead of 1,000: a rank whose host is late holds up all ranks.
    # Set this before the first question about GPUs: the driver reads the variable when it starts.
    os.environ.setdefault(LAUNCH_QUEUES_VARIABLE, "4x")
    # NCCL would register the tensors of captured collectives, and cannot where they lie in expandable segments.
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    place = local_device(device, local_rank)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    store = _rendezvous(rank, world_size, timeout_s)
    timeout = timedelta(seconds=timeout_s)
    backend = backend or ("cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo")
    options = None
    if place.type == "cuda" and "nccl" in backend:
        # With normal priority, the reduction of the last gradients would start only after all CTAs of the kernels
        # launched before it, and not overlap the update of the other parameters.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout  # PyTorch warns if it differs from the group's
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("collectives", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        pg_options=options,
        device_id=place if place.type == "cuda" else None,
    )
    try:
        yield Ranks(rank, world_size, place, timeout_s, store)
    except BaseException:
        _free_graphs()
        # Destroying a group would wait for kernels that wait for a lost rank. Abort all groups, also of strategies.
        for group in list(dist.distributed_c10d._world.pg_map) if place.type == "cuda" else ():
            group.abort()
        raise
    finally:
        _free_graphs()
        dist.destroy_process_group()


def free_before_leaving(graph: torch.cuda.CUDAGraph) -> None:
    """Free a CUDA graph before `process_group` ends: NCCL would wait for it forever."""
    _graphs.add(graph)


def _free_graphs() -> None:
    for graph in list(_graphs):
        graph.reset()
    _graphs.clear()


def local_device(device: str | torch.device, local_rank: int) -> torch.device:
    """Return the device of a rank; see `process_group`. Raise a UsageError if it asks for a GPU that is not there."""
    if str(device) == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.device(device)
    if place.type != "cuda":
        return place
    count = torch.cuda.device_count()
    index = local_rank if place.index is None else place.index
    if not count:
        raise UsageError(
            "parallel.no_gpu",
            "device: cuda was asked for, and this machine shows no GPU",
            hint="use the CPU: --device cpu, or --set run.device=cpu for run and benches; `auto` takes what there is",
        )
    if index >= count:
        raise UsageError(
            "parallel.too_few_gpus",
            f"device: local rank {local_rank} asks for GPU {index}, and this machine shows {count}",
            hint="start at most one rank per GPU, or set the device to cpu",
        )
    return torch.device("cuda", index)


@contextmanager
def hosted_store() -> Iterator[dict[str, str]]:
    """Host the store in which the ranks of this machine find one another; yield the environment by which they do.

    The process that starts the ranks hosts it, because rank 0 may die. The system picks a free port.
    """
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(socket.SOMAXCONN)
        host, port = listening.getsockname()
        taken = listening.detach()
        store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=taken)
    # As torchrun's agents host one: no rank hosts it.
    yield {"MASTER_ADDR": host, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


def _rendezvous(rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """Open the store that torchrun or `spawn_ranks` hosts; wait until every rank has arrived."""
    timeout = timedelta(seconds=timeout_s)
    try:
        store, _, _ = next(iter(rendezvous("env://", rank, world_size, timeout=timeout)))
    except dist.DistError as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error):
            where = os.environ.get("MASTER_ADDR", "") + ":" + os.environ.get("MASTER_PORT", "")
            raise LmkitError(
                "parallel.port_taken",
                f"rank {rank}: the port of {where} is taken",
                hint="choose another --master-port, or let torchrun find one with --standalone",
            ) from error
        raise LmkitError(
            "parallel.rendezvous_failed",
            f"rank {rank}: no rendezvous of {world_size} ranks within {timeout_s:g} s",
            hint="check that every rank was started, with the same address, port and world size",
        ) from error
    store.set_timeout(timeout)
    store.set(f"here/{rank}", "yes")
    if absent := absent_ranks(store, "here", world_size, timeout_s):
        raise LmkitError(
            "parallel.rank_absent",
            f"rank {rank}: rank {', '.join(map(str, absent))} did not come within {timeout_s:g} s",
            hint="look for that rank's own error; every rank must be started",
        )
    return store


def absent_ranks(store: dist.Store, sign: str, world_size: int, patience_s: float) -> list[int]:
    """Return the ranks that have not set `<sign>/<rank>` in the store within `patience_s`; a DistNetworkError if the
    store itself is gone."""
    deadline = time.monotonic() + patience_s
    absent = list(range(world_size))
    while True:
        absent = [rank for rank in absent if not store.check([f"{sign}/{rank}"])]
        if not absent or time.monotonic() > deadline:
            return absent
        time.sleep(_POLL_S)  # no signal reaches a rank that waits inside the store


def release_collectives(ranks: Ranks) -> None:
    """Make NCCL drop the tensors of ended collectives, so that memory measurements do not count them. Collective.

    Call it after a device synchronisation. By itself NCCL drops them ten times a second, or in the next collective.
    """
    if ranks.world_size > 1 and ranks.device.type == "cuda" and "nccl" in str(dist.get_backend_config()):
        assert dist.group.WORLD is not None
        dist.group.WORLD._wait_for_pending_works()  # the thread puts the tensors aside ...
        dist.all_reduce(torch.zeros(1, device=ranks.device))  # ... and the next collective drops them
        torch.cuda.synchronize(ranks.device)


def shutdown(code: int) -> NoReturn:
    """End this process: join threads, run exit handlers and flush, but skip the interpreter's teardown.

    gloo's worker threads still own tensors then, and need the interpreter to release them. Python before 3.14 ends
    such a thread inside C++ code, which aborts the process ("terminate called without an active exception").
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


ROLL_CALL_S = 2.0
"""How long survivors wait for one another's sign of life before they report the others as silent."""
GLOO_SIGNS = ("gloo/", "pair closure")
"""Texts in gloo's plain RuntimeErrors: its source path, or "Application timeout caused pair closure"."""


class RankLost(LmkitError):
    """Communication broke: another rank died, hangs, or ended with an error of its own."""

    is_consequence = True


@contextmanager
def step_watch(ranks: Ranks) -> Iterator[Callable[[int], AbstractContextManager[None]]]:
    """Yield a context for each step, `watch(step)`, that names the step in errors of communication.

    On GPUs, a step that is not finished after `ranks.timeout_s` seconds ends the process with exit code 1 and one
    line on stderr, because no exception can reach a thread that waits for the GPU.
    """
    running: list[tuple[int, float]] = []  # the step and its deadline
    ended = threading.Event()

    @contextmanager
    def watch(step: int) -> Iterator[None]:
        running.append((step, time.monotonic() + ranks.timeout_s))
        try:
            with losses_named(ranks, f"step {step}"):
                yield
        finally:
            running.clear()

    if ranks.world_size > 1 and ranks.device.type == "cuda":
        threading.Thread(
            target=_end_late_steps, args=(ranks, running, ended), name="lmkit-step-watch", daemon=True
        ).start()
    try:
        yield watch
    finally:
        ended.set()


def _end_late_steps(ranks: Ranks, running: Sequence[tuple[int, float]], ended: threading.Event) -> None:
    while not ended.wait(min(1.0, ranks.timeout_s / 8)):
        for step, deadline in tuple(running):
            if time.monotonic() > deadline:
                sys.stderr.write(
                    f"error[parallel.step_hangs]: rank {ranks.rank}, step {step}: unfinished after "
                    f"{ranks.timeout_s:g} s; this rank or one that it waits for hangs\n"
                )
                sys.stderr.flush()
                os._exit(1)


def is_communication(error: BaseException) -> bool:
    """Return whether an error says that a collective broke."""
    return isinstance(error, (RankLost, dist.DistError)) or any(sign in str(error) for sign in GLOO_SIGNS)


@contextmanager
def losses_named(ranks: Ranks, moment: str) -> Iterator[None]:
    """Turn a collective that breaks inside into a `RankLost` with this rank, the moment, and the silent ranks."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if ranks.world_size == 1 or not is_communication(error):
            raise
        timed_out = "imed out" in text or "imeout" in text
        what = f"no answer within {ranks.timeout_s:g} s" if timed_out else "the connection broke"
        raise RankLost(
            "parallel.rank_lost",
            f"rank {ranks.rank}, {moment}: {what}; {_roll_call(ranks)}",
            hint="look for the error or signal of the silent rank; a slow one needs a longer parallel.timeout_s",
        ) from error


def _roll_call(ranks: Ranks) -> str:
    """Name the ranks that do not report the broken collective: they died, hang, or have not noticed it yet."""
    assert ranks.store is not None
    try:
        ranks.store.set(f"survivor/{ranks.rank}", "yes")
        silent = absent_ranks(ranks.store, "survivor", ranks.world_size, ROLL_CALL_S)
    except dist.DistNetworkError:
        return "the rendezvous store is gone, too"  # the rank that died may have hosted it
    if not silent:
        return "all ranks are still there"
    return f"no sign of rank {', '.join(map(str, silent))} in {ROLL_CALL_S:g} s more"
