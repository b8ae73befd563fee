"""What ranks do in the tests of faults: functions that `spawn_ranks` runs in every rank."""

import os
import signal
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rank_model import one_step, seeded_model, start

from lmkit.errors import LmkitError, UsageError
from lmkit.parallel.ranks import losses_named, process_group, step_watch

FAULT_STEP = 2
# How long rank 0 waits for rank 1 once that hangs.
HANG_S = 1.0
# The timeout of all else: ranks that come late, as on a slow machine, are no fault. Pytest ends a test sooner.
PATIENT_S = 10_000.0


def train_until_fault(fault: str, strategy: str) -> str:
    """Three good steps with synchronisation; in the third, something happens to rank 1 inside backward."""
    torch.set_num_threads(1)
    with process_group("cpu", timeout_s=PATIENT_S) as ranks, step_watch(ranks) as watch:
        model = seeded_model(0, ranks)
        sync, call, optimizer = start(strategy, model, ranks)
        for step in range(4):
            with watch(step):
                if step == FAULT_STEP and ranks.rank == 1:
                    model.layers[1].up.weight.register_hook(lambda gradient: happen(fault))
                elif step == FAULT_STEP and fault == "hang":
                    # From now on whoever does not answer this rank within `HANG_S` is lost.
                    object.__setattr__(ranks, "timeout_s", HANG_S)
                    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=HANG_S))
                one_step(sync, call, optimizer, ranks, step)
    return "finished"


def ignore_signals_on_rank_0() -> None:
    """Rank 0 has the launcher told to stop; rank 1 ends by that, and rank 0, which does not, loses it."""
    with process_group("cpu", timeout_s=PATIENT_S) as ranks, losses_named(ranks, "between steps"):
        if ranks.rank == 1:
            threading.Event().wait()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.kill(os.getppid(), signal.SIGTERM)
        dist.barrier()


def stay_whatever_the_signal(ready: str) -> None:
    """As a rank that was stopped, or waits where no handler runs; tells that it was told."""
    rank = os.environ["RANK"]
    signal.signal(signal.SIGTERM, lambda number, frame: Path(f"{ready}.told{rank}").write_text("to stop"))
    Path(f"{ready}.pid{rank}").write_text(str(os.getpid()))
    while True:
        signal.pause()


def happen(fault: str) -> None:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        threading.Event().wait()
    if fault == "exception":
        raise ZeroDivisionError("in the middle of backward")
    if fault == "error":
        raise LmkitError("data.bad", "the data is bad", hint="look at it")


def refuse(kind: str) -> None:
    """All ranks raise the same error, as for a mistake in the recipe."""
    raise UsageError("recipe.unknown_key", f"recipe.toml: {kind}", hint="correct it")
