"""Faults of a rank in a process of its own, patched into its code before it begins."""

from __future__ import annotations

import itertools
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
from lmkit.training import checkpoint_writer, session, trainer
from lmkit.training.checkpoint import Retention
from lmkit.training.process import StopSignals
from lmkit.training.step import Step
from lmkit.training.trainer import Trainer

PATIENCE_S = 240
"""Only ends a test that hangs: far above what a slow machine needs, far below the ranks' timeout of 600 s."""
HANG_S = 2.0
"""How long rank 0 waits for rank 1 once that hangs."""
TIMEOUT_S = 500.0
"""The timeout of the recipe, which counts until then."""

REFUSED = threading.Event()
"""Set in a rank's process once an update was refused."""
SIGNALLED = threading.Event()
"""Set in a rank's process once it was told to stop."""
RANKS: list[Ranks] = []
"""This process's place, once its trainer runs."""

Happening = Callable[[int], None]
"""Called with the rank, on both ranks at the same place."""


def in_step(number: int, happen: Callable[[Step], None]) -> None:
    """Call `happen` at the beginning of a step, counted in this process from 1."""
    original, calls = Step.accumulate, itertools.count(1)

    def accumulate(self: Step, *batch: torch.Tensor) -> torch.Tensor:
        if next(calls) == number:
            happen(self)
        return original(self, *batch)

    Step.accumulate = accumulate  # type: ignore[method-assign]


def when_written(happen: Callable[[], None]) -> None:
    """Call `happen` before every tensor file that this rank writes."""
    original = checkpoint_writer.write_tensors

    def write_tensors(path: Path, tensors: Any) -> Any:
        happen()
        return original(path, tensors)

    checkpoint_writer.write_tensors = write_tensors  # type: ignore[assignment]


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


def tell_the_ranks() -> None:
    original = Trainer.run

    def run(self: Trainer) -> tuple[trainer.Ending, Any]:
        RANKS.append(self.ranks)
        return original(self)

    Trainer.run = run  # type: ignore[method-assign]


def _save_after_an_update_is_refused(rank: int) -> None:
    """The shard of the checkpoint before is still being written when the run stops."""
    if rank == 1:
        when_written(lambda: _must(REFUSED.wait(PATIENCE_S)))


def _must(happened: bool) -> None:
    assert happened


def _nan_loss_on_rank_1(rank: int) -> None:
    _save_after_an_update_is_refused(rank)
    original, calls = Step.accumulate, itertools.count(1)

    def accumulate(self: Step, *batch: torch.Tensor) -> torch.Tensor:
        loss = original(self, *batch)
        return loss * math.nan if next(calls) == 4 and rank == 1 else loss

    Step.accumulate = accumulate  # type: ignore[method-assign]


def _infinite_gradient_on_rank_1(rank: int) -> None:
    def spoil(step: Step) -> None:  # before the gradient enters the average of the ranks
        if rank == 1:
            step.model.ln_final.weight.register_hook(lambda gradient: gradient + math.inf)

    _save_after_an_update_is_refused(rank)
    in_step(4, spoil)


def _sigterm_to_rank_1(rank: int) -> None:
    # Step 3, because after step 4 comes an evaluation, which asks for signals itself.
    in_step(3, lambda step: os.kill(os.getpid(), signal.SIGTERM) if rank == 1 else None)


def _in_backward_of_step_3(rank: int, happen: Happening) -> None:
    in_step(3, lambda step: step.model.ln_final.weight.register_hook(lambda gradient: happen(rank)) and None)


def _in_the_evaluation_after_step_4(rank: int, happen: Happening) -> None:
    original = trainer.evaluate

    def evaluate(*arguments: Any, **options: Any) -> Any:
        happen(rank)
        return original(*arguments, **options)

    trainer.evaluate = evaluate  # type: ignore[assignment]


def _in_the_save_of_step_3(rank: int, happen: Happening) -> None:
    when_written(lambda: happen(rank))


def _in_the_save_of_step_3_while_step_6_waits_for_it(rank: int, happen: Happening) -> None:
    """No collective of a step is under way then, which would notice."""
    begin, saves, next_save = Trainer._save, itertools.count(1), threading.Event()

    def save(self: Trainer) -> None:
        if next(saves) == 2:
            next_save.set()
        begin(self)

    def happen_late() -> None:
        _must(next_save.wait(PATIENCE_S))
        happen(rank)

    Trainer._save = save  # type: ignore[method-assign]
    when_written(happen_late)


def _die(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def _hang(rank: int) -> None:
    """Rank 1 hangs. From now on rank 0 waits only `HANG_S`; at the start, ranks may be late."""
    if rank == 1:
        threading.Event().wait()
    (ranks,) = RANKS
    if ranks.timeout_s == HANG_S:
        return
    assert ranks.timeout_s == TIMEOUT_S
    assert dist.group.WORLD._get_backend(ranks.device).options._timeout == timedelta(seconds=TIMEOUT_S)
    object.__setattr__(ranks, "timeout_s", HANG_S)
    if threading.current_thread() is threading.main_thread():  # the writer's thread waits in no collective
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=HANG_S))


def _signal(rank: int) -> None:
    if rank == 1 and not SIGNALLED.is_set():
        SIGNALLED.set()
        os.kill(os.getpid(), signal.SIGTERM)


def _raise(rank: int) -> None:
    if rank == 1:
        raise ZeroDivisionError("in the middle of backward")


def _killed_before_the_second_pruning(rank: int) -> None:
    original, calls = Retention.prune, itertools.count(1)

    def prune(self: Retention) -> list[Path]:
        if next(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self)

    Retention.prune = prune  # type: ignore[method-assign]


def _never_finish_step_3(rank: int) -> None:
    note = StopSignals._note

    def noting(self: StopSignals, *signal: Any) -> None:
        note(self, *signal)
        os.write(sys.stderr.fileno(), b"noted\n")  # print() raises if the next signal interrupts it

    def hang(step: Step) -> None:
        print("hanging", file=sys.stderr, flush=True)
        while True:
            signal.pause()

    StopSignals._note = noting  # type: ignore[method-assign]
    in_step(3, hang)


def _wait_in_cpp_in_step_3(rank: int) -> None:
    """Wait as for a hanging rank or GPU: no Python handler runs until it returns."""

    def wait(step: Step) -> None:
        print("hanging", file=sys.stderr, flush=True)
        dist.HashStore().wait(["never"], timedelta(seconds=TIMEOUT_S))

    in_step(3, wait)


def _first_rank_dies_at_the_start(rank: int) -> None:
    session._open_folder = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]


def _draw_in_every_step(rank: int) -> None:
    """Draw random numbers as dropout would, on every rank another number of times."""
    original = Step.accumulate

    def accumulate(self: Step, *batch: torch.Tensor) -> torch.Tensor:
        torch.rand(rank + 1)
        return original(self, *batch)

    Step.accumulate = accumulate  # type: ignore[method-assign]


PLACES: dict[str, Callable[[int, Happening], None]] = {
    "in backward": _in_backward_of_step_3,
    "in evaluation": _in_the_evaluation_after_step_4,
    "in a save": _in_the_save_of_step_3,
    "in a save that is waited for": _in_the_save_of_step_3_while_step_6_waits_for_it,
}
FAULTS: dict[str, Callable[[int], None]] = {
    "no fault: random numbers are drawn": _draw_in_every_step,
    "nan loss on rank 1": _nan_loss_on_rank_1,
    "infinite gradient on rank 1": _infinite_gradient_on_rank_1,
    "SIGTERM to rank 1": _sigterm_to_rank_1,
    "rank 0 dies at the start": _first_rank_dies_at_the_start,
    "hang in step 3": _never_finish_step_3,
    "wait in C++ in step 3": _wait_in_cpp_in_step_3,
    "SIGTERM to rank 1 in evaluation": partial(_in_the_evaluation_after_step_4, happen=_signal),
    "SIGTERM to rank 1 in a save": partial(_in_the_save_of_step_3, happen=_signal),
    # However late the kill comes, there are steps left for the next life.
    "at most four steps": lambda rank: in_step(5, lambda step: threading.Event().wait() and None),
    "killed before the second pruning": _killed_before_the_second_pruning,
    **{
        f"rank 1 {what} {where}": partial(place, happen=happen)
        for what, happen in (("dies", _die), ("hangs", _hang), ("raises", _raise))
        for where, place in PLACES.items()
    },
}
