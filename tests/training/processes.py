"""Runs in processes of their own, one per rank, with faults that are patched into a rank's code before it begins."""

import faulthandler
import itertools
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lmkit.errors import LmkitError
from lmkit.parallel.collectives import Averager
from lmkit.parallel.ranks import Ranks, hosted_store
from lmkit.recipe.load import load_recipe
from lmkit.training import metrics, resume, session, setup, trainer
from lmkit.training.step import Step
from lmkit.training.trainer import Trainer

# Only ends a test that hangs: far above what a slow machine needs, far below the ranks' timeout of 600 s.
PATIENCE_S = 240
# How long rank 0 waits for rank 1 once that hangs.
HANG_S = 1.0
# The timeout of the recipe, which counts until then.
TIMEOUT_S = 500.0

# Set in a rank's process once an update was refused.
REFUSED = threading.Event()
# Set in a rank's process once it was told to stop.
SIGNALLED = threading.Event()
# This process's place, once its trainer runs.
RANKS: list[Ranks] = []

# Called with the rank, on both ranks at the same place.
Happening = Callable[[int], None]


class Fleet:
    """Start ranks and collect how they ended."""

    def __init__(self, context: BaseContext, folder: Path, meetings: ExitStack) -> None:
        self._context = context
        self._folder = folder
        self._meetings = meetings
        self._started = 0
        self.running: list[BaseProcess] = []

    def start(
        self,
        settings: list[str],
        *,
        recipe: str | None = None,
        ranks: int = 1,
        fault: str = "",
        of_rank_1: Sequence[str] = (),
        **options: Any,
    ) -> list[BaseProcess]:
        """Start all ranks of a run.

        Args:
            of_rank_1: further `--set` arguments of rank 1 alone.
            options: of `train`.
        """
        self._started += 1
        self.log = self._folder / f"{self._started}.log"
        meeting = self._meetings.enter_context(hosted_store())
        started = []
        for rank in range(ranks):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            environment = {**place, **meeting} if ranks > 1 else {}
            own = [*settings, *(of_rank_1 if rank == 1 else ())]
            process = self._context.Process(  # type: ignore[attr-defined]
                target=_live, args=(own, recipe, environment, fault, str(self.log), options)
            )
            process.start()
            started.append(process)
        self.running += started
        return started

    def train(self, settings: list[str], *, exits: Sequence[int] = (), **options: Any) -> None:
        """Start, and wait for the end with these exit codes; by default with 0 of every rank."""
        codes = ends(self.start(settings, **options))
        assert codes == ([*exits] or [0] * len(codes)), self.said()

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def wait_until_said(self, text: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.said():
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.01)


def ends(processes: list[BaseProcess]) -> list[int | None]:
    for process in processes:
        process.join(PATIENCE_S)
    return [process.exitcode for process in processes]


def _live(
    settings: list[str],
    recipe: str | None,
    environment: dict[str, str],
    fault: str,
    log: str,
    options: dict[str, Any],
) -> None:
    """Run a rank as `lmkit train` does, from the recipe on. An error is one line with its code in the log."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    rank = int(environment.get("RANK", "0"))
    if fault:
        around(Step, "update", _note_refused_updates)
        around(Trainer, "run", lambda run, self: RANKS.append(self.ranks) or run(self))
        FAULTS[fault](rank)
    around(metrics, "draw_losses", lambda *arguments, **keywords: None)
    sys.stderr = open(log, "a")  # noqa: SIM115
    faulthandler.dump_traceback_later(0.9 * PATIENCE_S, file=sys.stderr)  # where a rank hangs
    try:
        session.train(load_recipe(recipe, settings), **options)
    except LmkitError as error:
        say(f"{error.code} | {error.message}")
        os._exit(error.exit_code)
    except KeyboardInterrupt:
        os._exit(130)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def around(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace `owner.name` by `wrapper(original, *arguments, **options)`."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *arguments, **options: wrapper(original, *arguments, **options))


def in_step(number: int, happen: Callable[[Step], Any]) -> None:
    """Call `happen` at the beginning of a step, counted in this process from 1."""
    calls = itertools.count(1)

    def accumulate(original: Any, step: Step, *batch: torch.Tensor) -> torch.Tensor:
        if next(calls) == number:
            happen(step)
        return original(step, *batch)

    around(Step, "accumulate", accumulate)


def when_written(happen: Callable[[], Any]) -> None:
    """Call `happen` before every tensor file that this rank writes."""

    def write_tensors(original: Any, *arguments: Any) -> Any:
        happen()
        return original(*arguments)

    around(resume, "write_tensors", write_tensors)


def _note_refused_updates(update: Any, step: Step, *arguments: Any, **options: Any) -> Any:
    outcome = update(step, *arguments, **options)
    if not outcome.applied:
        REFUSED.set()
    return outcome


def _must(happened: bool) -> None:
    assert happened


def _save_after_an_update_is_refused(rank: int) -> None:
    """The shard of the checkpoint before is still being written when the run stops."""
    if rank == 1:
        when_written(lambda: _must(REFUSED.wait(PATIENCE_S)))


def _nan_loss_on_rank_1(rank: int) -> None:
    _save_after_an_update_is_refused(rank)
    calls = itertools.count(1)

    def accumulate(original: Any, *arguments: Any) -> torch.Tensor:
        loss = original(*arguments)
        return loss * math.nan if next(calls) == 4 and rank == 1 else loss

    around(Step, "accumulate", accumulate)


def _nan_loss_on_rank_1_found_a_step_late(rank: int) -> None:
    Step.runs_ahead = True  # type: ignore[method-assign, assignment]
    _nan_loss_on_rank_1(rank)


def _infinite_gradient_on_rank_1(rank: int) -> None:
    def spoil(step: Step) -> None:  # before the gradient enters the average of the ranks
        if rank == 1:
            step.model.ln_final.weight.register_hook(lambda gradient: gradient + math.inf)

    _save_after_an_update_is_refused(rank)
    in_step(4, spoil)


def _sigterm_to_rank_1(rank: int) -> None:
    # Step 3, because after step 4 comes an evaluation, which asks for signals itself.
    in_step(3, lambda step: rank == 1 and os.kill(os.getpid(), signal.SIGTERM))


def _in_backward_of_step_3(rank: int, happen: Happening) -> None:
    in_step(3, lambda step: step.model.ln_final.weight.register_hook(lambda gradient: happen(rank)))


def _in_the_evaluation_after_step_4(rank: int, happen: Happening) -> None:
    around(trainer, "evaluate", lambda original, *a, **options: happen(rank) or original(*a, **options))


def _in_the_save_of_step_3(rank: int, happen: Happening) -> None:
    when_written(lambda: happen(rank))


def _in_the_save_of_step_3_while_step_6_waits_for_it(rank: int, happen: Happening) -> None:
    """No collective of a step is under way then, which would notice."""
    saves, next_save = itertools.count(1), threading.Event()

    def save(original: Any, self: Trainer) -> None:
        if next(saves) == 2:
            next_save.set()
        original(self)

    around(Trainer, "_save", save)
    when_written(lambda: (_must(next_save.wait(PATIENCE_S)), happen(rank)))


def _other_first_weights_on_rank_1(rank: int) -> None:
    if rank == 1:
        around(setup, "TransformerLM", lambda original, *a, **b: (torch.rand(3), original(*a, **b))[1])


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
        for group in dist.distributed_c10d._world.pg_map:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=HANG_S), group)


def _signal(rank: int) -> None:
    if rank == 1 and not SIGNALLED.is_set():
        SIGNALLED.set()
        os.kill(os.getpid(), signal.SIGTERM)


def _raise(rank: int) -> None:
    if rank == 1:
        raise ZeroDivisionError("in the middle of backward")


def _wait_in_cpp_in_step_3(rank: int) -> None:
    """Wait as for a hanging rank or GPU: no Python handler runs until it returns."""

    def wait(step: Step) -> None:
        say("hanging")
        dist.HashStore().wait(["never"], timedelta(seconds=TIMEOUT_S))

    in_step(3, wait)


def _first_rank_dies_at_the_start(rank: int) -> None:
    around(resume, "open_folder", lambda *arguments: os.kill(os.getpid(), signal.SIGKILL))


def _draw_in_every_step(rank: int) -> None:
    """Draw random numbers as dropout would, on every rank another number of times."""

    def accumulate(original: Any, *arguments: Any) -> torch.Tensor:
        torch.rand(rank + 1)
        return original(*arguments)

    around(Step, "accumulate", accumulate)


def _simulate_fp8(rank: int) -> None:
    """Let a CPU simulate fp8 products, of the matrices of a tiny model."""
    from lmkit.model import fp8

    fp8.check_fp8 = lambda device: None
    fp8.FP8_LEAST_WIDTH = 16


def _in_a_collective_of_step_3(rank: int, happen: Happening, name: str) -> None:
    """In the middle of the model: some have been made before."""

    def begin(step: Step) -> None:
        calls = itertools.count(1)

        def start(original: Any, *arguments: Any) -> Any:
            if next(calls) == 3:
                happen(rank)
            return original(*arguments)

        around(Averager, name, start)

    in_step(3, begin)


PLACES: dict[str, Callable[[int, Happening], None]] = {
    "in backward": _in_backward_of_step_3,
    "in a gather": partial(_in_a_collective_of_step_3, name="all_gather"),
    "in a reduction": partial(_in_a_collective_of_step_3, name="reduce_scatter"),
    "in evaluation": _in_the_evaluation_after_step_4,
    "in a save": _in_the_save_of_step_3,
    "in a save that is waited for": _in_the_save_of_step_3_while_step_6_waits_for_it,
}
FAULTS: dict[str, Callable[[int], None]] = {
    "other first weights on rank 1": _other_first_weights_on_rank_1,
    "no fault: random numbers are drawn": _draw_in_every_step,
    "no fault: fp8 is simulated": _simulate_fp8,
    "nan loss on rank 1": _nan_loss_on_rank_1,
    "nan loss on rank 1, found a step late": _nan_loss_on_rank_1_found_a_step_late,
    "infinite gradient on rank 1": _infinite_gradient_on_rank_1,
    "SIGTERM to rank 1": _sigterm_to_rank_1,
    "rank 0 dies at the start": _first_rank_dies_at_the_start,
    "wait in C++ in step 3": _wait_in_cpp_in_step_3,
    "SIGTERM to rank 1 in evaluation": partial(_in_the_evaluation_after_step_4, happen=_signal),
    "SIGTERM to rank 1 in a save": partial(_in_the_save_of_step_3, happen=_signal),
    # However late the kill comes, there are steps left for the next life.
    "at most four steps": lambda rank: in_step(5, lambda step: threading.Event().wait()),
    **{
        f"rank 1 {what} {where}": partial(place, happen=happen)
        for what, happen in (("dies", _die), ("hangs", _hang), ("raises", _raise))
        for where, place in PLACES.items()
    },
}
