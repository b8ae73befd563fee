"""What happens to a rank of a run in processes of its own, put into its code before it begins."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lmkit.parallel.ranks import Ranks
from lmkit.training import checkpoint_writer, session
from lmkit.training import trainer as loop
from lmkit.training.checkpoint import Retention
from lmkit.training.signals import StopSignals
from lmkit.training.step import Step

PATIENCE_S = 240
"""Only to end a test that hangs: far above what a slow machine needs, far below the ranks' timeout of 600 s."""

HANG_S = 2.0
"""How long rank 0 waits for rank 1 once that hangs."""

TIMEOUT_S = 500.0
"""What the recipe says instead, and what counted until then."""

REFUSED = threading.Event()
"""Set in a rank's process once an update was refused there."""


def _save_no_sooner_than_an_update_is_refused(rank: int) -> None:
    """The shard of the checkpoint before is still on its way when the run stops."""
    original = checkpoint_writer.write_tensors

    def write_tensors(path: Path, tensors: Any) -> Any:
        assert REFUSED.wait(PATIENCE_S)
        return original(path, tensors)

    if rank == 1:
        checkpoint_writer.write_tensors = write_tensors  # type: ignore[assignment]


def _nan_loss_on_rank_1(rank: int) -> None:
    _save_no_sooner_than_an_update_is_refused(rank)
    original, calls = Step.accumulate, iter(range(1, 1000))

    def accumulate(self: Step, *batch: torch.Tensor) -> torch.Tensor:
        loss = original(self, *batch)
        return loss * math.nan if next(calls) == 4 and rank == 1 else loss

    Step.accumulate = accumulate  # type: ignore[method-assign]


def _infinite_gradient_on_rank_1(rank: int) -> None:
    _save_no_sooner_than_an_update_is_refused(rank)
    original, calls = Step.accumulate, iter(range(1, 1000))

    def accumulate(self: Step, *batch: torch.Tensor) -> torch.Tensor:
        if next(calls) == 4 and rank == 1:  # before the gradient is handed to the ranks' average
            weight = self.model.ln_final.weight  # type: ignore[attr-defined]
            weight.register_hook(lambda gradient: gradient + math.inf)
        return original(self, *batch)

    Step.accumulate = accumulate  # type: ignore[method-assign]


def _signal_itself_on_rank_1(rank: int) -> None:
    original, calls = Step.accumulate, iter(range(1, 1000))

    def accumulate(self: Step, *batch: torch.Tensor) -> torch.Tensor:
        if next(calls) == 3 and rank == 1:  # after step 4 comes an evaluation, which would ask for itself
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *batch)

    Step.accumulate = accumulate  # type: ignore[method-assign]


def tell_whether_a_refused_update_changed_weights(rank: int) -> None:
    original = Step.update

    def update(self: Step, loss: torch.Tensor, **options: Any) -> Any:
        weights = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        before = [weight.detach().clone() for weight in weights]
        outcome = original(self, loss, **options)
        if outcome.nonfinite:
            same = all(torch.equal(old, new) for old, new in zip(before, weights, strict=True))
            print(f"rank {rank}: weights {'untouched' if same else 'CHANGED'}", file=sys.stderr, flush=True)
            REFUSED.set()
        return outcome

    Step.update = update  # type: ignore[method-assign]


Happening = Callable[[int], None]
"""What happens to rank 1, and to rank 0 at the same place."""

RANKS: list[Ranks] = []
"""This process's place, once its loop runs."""


def tell_the_ranks() -> None:
    original = loop.Trainer.run

    def run(self: loop.Trainer) -> loop.Ending:
        RANKS.append(self.parts.ranks)
        return original(self)

    loop.Trainer.run = run  # type: ignore[method-assign]


def _in_backward_of_step_3(rank: int, happen: Happening) -> None:
    original, calls = Step.accumulate, iter(range(1, 1000))

    def accumulate(self: Step, *batch: torch.Tensor) -> torch.Tensor:
        if next(calls) == 3:
            weight = self.model.ln_final.weight  # type: ignore[attr-defined]
            weight.register_hook(lambda gradient: happen(rank))
        return original(self, *batch)

    Step.accumulate = accumulate  # type: ignore[method-assign]


def _in_the_evaluation_after_step_4(rank: int, happen: Happening) -> None:
    original = loop.evaluate

    def evaluate(*arguments: Any, **options: Any) -> Any:
        happen(rank)
        return original(*arguments, **options)

    loop.evaluate = evaluate  # type: ignore[assignment]


def _in_the_save_of_step_3(rank: int, happen: Happening) -> None:
    original = checkpoint_writer.write_tensors

    def write_tensors(path: Path, tensors: Any) -> Any:
        happen(rank)
        return original(path, tensors)

    checkpoint_writer.write_tensors = write_tensors  # type: ignore[assignment]


def _in_the_save_of_step_3_while_step_6_waits_for_it(rank: int, happen: Happening) -> None:
    """No collective of a step is under way then, which would notice."""
    begin, saves, next_save = loop.Trainer._save, iter(range(1, 1000)), threading.Event()

    def save(self: loop.Trainer) -> None:
        if next(saves) == 2:
            next_save.set()
        begin(self)

    def happen_late(rank: int) -> None:
        assert next_save.wait(PATIENCE_S)
        happen(rank)

    loop.Trainer._save = save  # type: ignore[method-assign]
    _in_the_save_of_step_3(rank, happen_late)


def _die(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def _hang(rank: int) -> None:
    """Rank 1 hangs; from here on, and not from the start, when a rank may be late, rank 0 waits only `HANG_S`."""
    if rank == 1:
        threading.Event().wait()
    (ranks,) = RANKS
    if ranks.timeout_s == HANG_S:
        return
    assert ranks.timeout_s == TIMEOUT_S
    assert dist.group.WORLD._get_backend(ranks.device).options._timeout == timedelta(seconds=TIMEOUT_S)
    object.__setattr__(ranks, "timeout_s", HANG_S)
    if (
        threading.current_thread() is threading.main_thread()
    ):  # what writes a checkpoint waits in no collective
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=HANG_S))


def _signal(rank: int) -> None:
    if rank == 1 and not SIGNALLED.is_set():
        SIGNALLED.set()
        os.kill(os.getpid(), signal.SIGTERM)


SIGNALLED = threading.Event()
"""Set in a rank's process once it was told to stop."""


def _raise(rank: int) -> None:
    if rank == 1:
        raise ZeroDivisionError("in the middle of backward")


PLACES: dict[str, Callable[[int, Happening], None]] = {
    "in backward": _in_backward_of_step_3,
    "in evaluation": _in_the_evaluation_after_step_4,
    "in a save": _in_the_save_of_step_3,
    "in a save that is waited for": _in_the_save_of_step_3_while_step_6_waits_for_it,
}


def _go_no_further_than_step_4_of_this_life(rank: int) -> None:
    """However late the kill comes, there are steps left for the next one."""
    original, calls = Step.accumulate, iter(range(1, 1000))

    def accumulate(self: Step, *batch: torch.Tensor) -> torch.Tensor:
        if next(calls) == 5:
            threading.Event().wait()
        return original(self, *batch)

    Step.accumulate = accumulate  # type: ignore[method-assign]


def _killed_before_the_second_pruning(rank: int) -> None:
    original, calls = Retention.prune, iter(range(1, 1000))

    def prune(self: Retention) -> list[Path]:
        if next(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self)

    Retention.prune = prune  # type: ignore[method-assign]


def _never_finish_step_3(rank: int) -> None:
    note = StopSignals._note

    def noting(self: StopSignals, *signal: Any) -> None:
        note(self, *signal)
        print("noted", file=sys.stderr, flush=True)

    StopSignals._note = noting  # type: ignore[method-assign]
    original, calls = Step.accumulate, iter(range(1, 1000))

    def accumulate(self: Step, *batch: torch.Tensor) -> torch.Tensor:
        if next(calls) == 3:
            print("hanging", file=sys.stderr, flush=True)
            while True:
                signal.pause()
        return original(self, *batch)

    Step.accumulate = accumulate  # type: ignore[method-assign]


def _wait_in_cpp_in_step_3(rank: int) -> None:
    """As for a rank that hangs, or a GPU: no handler of Python's runs until that returns."""
    original, calls = Step.accumulate, iter(range(1, 1000))

    def accumulate(self: Step, *batch: torch.Tensor) -> torch.Tensor:
        if next(calls) == 3:
            print("hanging", file=sys.stderr, flush=True)
            dist.HashStore().wait(["never"], timedelta(seconds=TIMEOUT_S))
        return original(self, *batch)

    Step.accumulate = accumulate  # type: ignore[method-assign]


def _first_rank_dies_at_the_start(rank: int) -> None:
    session._open_folder = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]


def _draw_in_every_step(rank: int) -> None:
    """As dropout would, on every rank another number of times."""
    original = Step.accumulate

    def accumulate(self: Step, *batch: torch.Tensor) -> torch.Tensor:
        torch.rand(rank + 1)
        return original(self, *batch)

    Step.accumulate = accumulate  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[int], None]] = {
    "no fault: random numbers are drawn": _draw_in_every_step,
    "nan loss on rank 1": _nan_loss_on_rank_1,
    "infinite gradient on rank 1": _infinite_gradient_on_rank_1,
    "SIGTERM to rank 1": _signal_itself_on_rank_1,
    "rank 0 dies at the start": _first_rank_dies_at_the_start,
    "hang in step 3": _never_finish_step_3,
    "wait in C++ in step 3": _wait_in_cpp_in_step_3,
    "SIGTERM to rank 1 in evaluation": partial(_in_the_evaluation_after_step_4, happen=_signal),
    "SIGTERM to rank 1 in a save": partial(_in_the_save_of_step_3, happen=_signal),
    "at most four steps": _go_no_further_than_step_4_of_this_life,
    "killed before the second pruning": _killed_before_the_second_pruning,
    **{
        f"rank 1 {what} {where}": partial(place, happen=happen)
        for what, happen in (("dies", _die), ("hangs", _hang), ("raises", _raise))
        for where, place in PLACES.items()
    },
}
