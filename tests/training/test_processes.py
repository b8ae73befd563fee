"""Runs in processes of their own: killed, signalled, several ranks.

The processes come from a fork server that has imported torch already (see conftest), so that each takes a fraction
of a second; the signals, locks, files and collectives are real.
"""

from __future__ import annotations

import math
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from run_folders import losses, saved

from lmkit.commands import train
from lmkit.errors import LmkitError
from lmkit.parallel.meeting import RENDEZVOUS_VARIABLE, hosted_store
from lmkit.parallel.process_group import Ranks
from lmkit.parallel.strategies import STRATEGIES
from lmkit.recipe.load import load_recipe
from lmkit.recipe.schema import Recipe
from lmkit.training import checkpoint_writer, loop
from lmkit.training.checkpoint_folder import newest_valid, step_name
from lmkit.training.checkpoints import Checkpoint, open_checkpoint, plain_model
from lmkit.training.retention import Retention
from lmkit.training.signals import StopSignals
from lmkit.training.step import Step

Tiny = Callable[..., Recipe]
PATIENCE_S = 240
"""Only to end a test that hangs: far above what a slow machine needs, far below the ranks' timeout of 600 s."""
HANG_S = 2.0
"""How long rank 0 waits for rank 1 once that hangs."""
TIMEOUT_S = 500.0
"""What the recipe says instead, and what counted until then."""


def newest(recipe: Recipe) -> Checkpoint:
    choice = newest_valid(recipe.run.path / "checkpoints")
    assert choice.path is not None
    return open_checkpoint(choice.path)


def assert_same_tensors(left: Checkpoint, right: Checkpoint) -> None:
    assert left.state.step == right.state.step
    for shard in range(left.state.optimizer_shards):
        for mine, yours in (
            (left.model_tensors(), right.model_tensors()),
            (left.optimizer_tensors(shard), right.optimizer_tensors(shard)),
        ):
            assert mine.keys() == yours.keys()
            for name, tensor in mine.items():
                assert torch.equal(tensor, yours[name]), name


def live(settings: list[str], environment: dict[str, str], options: dict[str, Any], fault: str) -> None:
    """A rank's process: everything that `lmkit train` does, from the recipe on."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    rank = int(environment.get("RANK", "0"))
    if fault:
        _tell_whether_a_refused_update_changed_weights(rank)
        _tell_the_ranks()
        FAULTS[fault](rank)
    train.draw_losses = lambda *arguments, **keywords: None  # type: ignore[assignment]
    sys.stderr = open(options.pop("log"), "a")  # noqa: SIM115
    try:
        train.run(load_recipe(None, settings), **options)
    except LmkitError as error:
        print(error.message, file=sys.stderr, flush=True)
        os._exit(error.exit_code)
    except KeyboardInterrupt:
        os._exit(130)


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
            weight = self._model.ln_final.weight  # type: ignore[attr-defined]
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


def _tell_whether_a_refused_update_changed_weights(rank: int) -> None:
    original = Step.update

    def update(self: Step, loss: torch.Tensor, **options: Any) -> Any:
        weights = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
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


def _tell_the_ranks() -> None:
    original = loop.Loop.run

    def run(self: loop.Loop) -> loop.Ending:
        RANKS.append(self.parts.ranks)
        return original(self)

    loop.Loop.run = run  # type: ignore[method-assign]


def _in_backward_of_step_3(rank: int, happen: Happening) -> None:
    original, calls = Step.accumulate, iter(range(1, 1000))

    def accumulate(self: Step, *batch: torch.Tensor) -> torch.Tensor:
        if next(calls) == 3:
            weight = self._model.ln_final.weight  # type: ignore[attr-defined]
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
    begin, saves, next_save = loop.Loop._save, iter(range(1, 1000)), threading.Event()

    def save(self: loop.Loop) -> None:
        if next(saves) == 2:
            next_save.set()
        begin(self)

    def happen_late(rank: int) -> None:
        assert next_save.wait(PATIENCE_S)
        happen(rank)

    loop.Loop._save = save  # type: ignore[method-assign]
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
    train._open_folder = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]


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


class Fleet:
    """Starts ranks and collects how they ended."""

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
        ranks: int = 1,
        fault: str = "",
        of_rank_1: Sequence[str] = (),
        **options: Any,
    ) -> list[BaseProcess]:
        self._started += 1
        self.log = self._folder / f"{self._started}.log"
        started = []
        meeting = self._meetings.enter_context(hosted_store())
        for rank in range(ranks):
            environment = (
                {}
                if ranks == 1
                else {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    RENDEZVOUS_VARIABLE: meeting,
                }
            )
            process = self._context.Process(  # type: ignore[attr-defined]
                target=live,
                args=(
                    [*settings, *(of_rank_1 if rank == 1 else ())],
                    environment,
                    {**options, "log": str(self.log)},
                    fault,
                ),
            )
            process.start()
            started.append(process)
        self.running += started
        return started

    def train(self, settings: list[str], **options: Any) -> list[int | None]:
        """Start, wait for the end, return the exit codes."""
        return ends(self.start(settings, **options))

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


@pytest.fixture
def fleet(processes: BaseContext, tmp_path: Path) -> Iterator[Fleet]:
    with ExitStack() as meetings:
        fleet = Fleet(processes, tmp_path, meetings)
        yield fleet
        for process in fleet.running:
            if process.is_alive():
                process.kill()
            process.join()


def test_fault_46_killed_at_random_20_times_and_still_the_same_run(
    fleet: Fleet, tiny: Tiny, settings: Callable[..., list[str]]
) -> None:
    steps = ("train.steps=100", "train.eval_interval=0", "checkpoint.interval=1")
    whole, battered = settings(*steps, "run.name=whole"), settings(*steps, "run.name=battered")
    assert fleet.train(whole) == [0]
    recipe = tiny(*steps, "run.name=battered")
    generator = random.Random(46)
    reached = 0
    for _ in range(20):
        (process,) = fleet.start(battered, fault="at most four steps")
        deadline = time.monotonic() + PATIENCE_S
        while process.is_alive() and max(saved(recipe), default=0) < reached + 2:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        process.join(generator.uniform(0, 0.03))  # it saves all the time: this is somewhere in a save
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        choice = newest_valid(recipe.run.path / "checkpoints")  # one loads, whatever lies around
        assert choice.path is not None
        assert choice.skipped == ()  # nothing half written ever has a final name
        assert open_checkpoint(choice.path).state.step >= reached
        reached = open_checkpoint(choice.path).state.step
    assert fleet.train(battered) == [0]
    assert_same_tensors(newest(tiny(*steps, "run.name=whole")), newest(recipe))
    assert losses(recipe) == losses(tiny(*steps, "run.name=whole"))
    assert not list(recipe.run.path.rglob("*.partial"))
    assert len(saved(recipe)) == 2


def test_fault_47_killed_between_the_rename_and_pruning_it_resumes(
    fleet: Fleet, tiny: Tiny, settings: Callable[..., list[str]]
) -> None:
    often = ("checkpoint.interval=3", "checkpoint.keep_last=1")
    assert fleet.train(settings(*often, "run.name=whole")) == [0]
    assert fleet.train(settings(*often), fault="killed before the second pruning") == [-signal.SIGKILL]
    assert saved(tiny()) == [3, 6]  # the newer one has its name, the older one is still there
    assert fleet.train(settings(*often)) == [0], fleet.said()
    assert "resuming from" in fleet.said()
    assert step_name(6) in fleet.said()
    assert saved(tiny()) == [10]
    assert_same_tensors(newest(tiny("run.name=whole")), newest(tiny()))


def test_fault_62_the_lock_of_a_killed_run_does_not_stay(
    fleet: Fleet, settings: Callable[..., list[str]]
) -> None:
    (process,) = fleet.start(settings(), fault="hang in step 3")
    fleet.wait_until_said("hanging")
    assert fleet.train(settings()) == [1]  # fault 61: while it lives, nobody else gets in
    assert "another process" in fleet.said()
    process.kill()
    process.join()
    assert fleet.train(settings()) == [0]


def test_fault_71_a_second_signal_leaves_at_once(
    fleet: Fleet, tiny: Tiny, settings: Callable[..., list[str]]
) -> None:
    assert fleet.train(settings(), stop_at_step=1) == [0]
    (process,) = fleet.start(settings(), fault="hang in step 3")
    fleet.wait_until_said("hanging")
    assert process.pid is not None
    os.kill(process.pid, signal.SIGTERM)
    fleet.wait_until_said("noted")  # a second one that comes before is the same to the system
    assert process.is_alive()  # the first one waits for the end of the step
    os.kill(process.pid, signal.SIGTERM)
    assert ends([process]) == [143]
    assert saved(tiny()) == [1]
    assert newest(tiny()).state.step == 1


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="sees in /proc that a signal was taken")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_fault_71_a_second_signal_leaves_at_once_where_python_has_no_say(
    number: int, fleet: Fleet, tiny: Tiny, settings: Callable[..., list[str]]
) -> None:
    assert fleet.train(settings(), stop_at_step=1) == [0]
    (process,) = fleet.start(settings(), fault="wait in C++ in step 3")
    fleet.wait_until_said("hanging")
    for _ in range(2):
        assert process.is_alive()
        os.kill(process.pid or 0, number)
        wait_until_taken(process)
    assert ends([process]) == [128 + number]
    assert saved(tiny()) == [1]


def wait_until_taken(process: BaseProcess) -> None:
    """No signal waits any more: a second one would be the same to the system."""
    deadline = time.monotonic() + PATIENCE_S
    while process.is_alive():
        status = Path(f"/proc/{process.pid}/status").read_text()
        if not any(
            int(mask, 16) for mask in re.findall(r"^(?:SigPnd|ShdPnd):\s*(\w+)$", status, re.MULTILINE)
        ):
            return
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_one_and_two_ranks_have_the_same_losses(
    fleet: Fleet, tiny: Tiny, settings: Callable[..., list[str]]
) -> None:
    one, two = settings("run.name=one"), settings("run.name=two")
    assert fleet.train(one) == [0]
    assert fleet.train(two, ranks=2) == [0, 0]
    for kind in ("train", "valid", "final"):
        pairs = list(zip(losses(tiny("run.name=one"), kind), losses(tiny("run.name=two"), kind), strict=True))
        assert pairs
        for (step, single), (_, double) in pairs:
            # The same float32 numbers, summed in another order: a few units in the last place (6e-8 relative),
            # which ten updates hardly amplify.
            assert double == pytest.approx(single, rel=2e-6), (kind, step)


@pytest.mark.parametrize("strategy", ["naive", "bucketed", "torch_ddp", "zero1"])
def test_fault_54_two_ranks_resume_bit_for_bit(
    strategy: str, fleet: Fleet, tiny: Tiny, settings: Callable[..., list[str]]
) -> None:
    assert strategy in STRATEGIES
    chosen = f"parallel.strategy={strategy}"
    whole, parts = settings(chosen, "run.name=whole"), settings(chosen, "run.name=parts")
    options = {"ranks": 2, "fault": "no fault: random numbers are drawn"}
    assert fleet.train(whole, **options) == [0, 0], fleet.said()
    assert fleet.train(parts, **options, stop_at_step=5) == [0, 0], fleet.said()
    assert fleet.train(parts, **options) == [0, 0], fleet.said()
    left, right = newest(tiny(chosen, "run.name=whole")), newest(tiny(chosen, "run.name=parts"))
    assert left.state.optimizer_shards == (2 if strategy == "zero1" else 1)
    shards = [
        f"optimizer-0000{i}-of-0000{left.state.optimizer_shards}" for i in range(left.state.optimizer_shards)
    ]
    tensors = {path.stem for path in left.path.glob("*.safetensors")}
    assert tensors == {"model", *shards}  # each written by one rank
    assert left.state.rng == right.state.rng
    assert len(set(left.state.rng)) == 2  # each rank has its own
    assert_same_tensors(left, right)
    for kind in ("train", "valid", "final"):
        assert losses(tiny("run.name=whole"), kind) == losses(tiny("run.name=parts"), kind) != []
    plain_model(left, device="cpu")  # fault 59, for what each strategy wraps a model in


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ((1, "none"), (2, "zero1")),
        ((2, "zero1"), (1, "none")),
        ((2, "bucketed"), (1, "none")),
    ],
)
def test_fault_56_another_number_of_ranks_goes_on_with_the_same_run_and_says_so(
    first: tuple[int, str],
    then: tuple[int, str],
    fleet: Fleet,
    tiny: Tiny,
    settings: Callable[..., list[str]],
) -> None:
    assert fleet.train(settings("run.name=whole")) == [0]
    for (ranks, strategy), options in ((first, {"stop_at_step": 5}), (then, {})):
        changed = settings("run.name=parts", f"parallel.strategy={strategy}")
        assert fleet.train(changed, ranks=ranks, **options) == [0] * ranks, fleet.said()
    assert f"saved by {first[0]} rank" in fleet.said()
    for (step, expected), (_, found) in zip(
        losses(tiny("run.name=whole")), losses(tiny("run.name=parts")), strict=True
    ):
        assert found == pytest.approx(expected, rel=2e-6), step  # as for one against two ranks


@pytest.mark.parametrize("fault", ["nan loss on rank 1", "infinite gradient on rank 1"])
def test_fault_66_and_67_all_ranks_stop_before_the_update_that_one_cannot_make(
    fault: str, fleet: Fleet, tiny: Tiny, settings: Callable[..., list[str]]
) -> None:
    sharded = ("checkpoint.interval=3", "parallel.strategy=zero1")  # so that both ranks have to write
    recipe = tiny(*sharded)
    assert fleet.train(settings(*sharded), ranks=2, fault=fault) == [1, 1], fleet.said()
    culprit = "step 4: loss nan on rank 1: not finite" if "nan" in fault else "gradient norm inf: not finite"
    assert fleet.said().count(culprit) == 2, fleet.said()
    assert fleet.said().count("step 4: loss") == 2
    for rank in (0, 1):
        assert f"rank {rank}: weights untouched" in fleet.said()
    assert saved(recipe) == [3]
    tensors = newest(recipe).model_tensors()
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())


@pytest.mark.parametrize("where", ["", " in evaluation", " in a save"])
def test_fault_69_and_70_a_signal_to_one_rank_makes_all_save_the_same_step(
    where: str, fleet: Fleet, tiny: Tiny, settings: Callable[..., list[str]]
) -> None:
    sharded = ["parallel.strategy=zero1"]  # so that both ranks have to write
    if where == " in a save":
        sharded.append("checkpoint.interval=3")
    assert fleet.train(settings(*sharded, "run.name=whole"), ranks=2) == [0, 0], fleet.said()
    assert fleet.train(settings(*sharded), ranks=2, fault="SIGTERM to rank 1" + where) == [143, 143], (
        fleet.said()
    )
    recipe = tiny(*sharded)
    last = saved(recipe)[-1]
    # A save goes on beside the steps that follow: which of them meets the signal is up to the machine. Two are kept.
    with_intervals = sorted({*range(3, last + 1, 3), last})[-2:]
    assert {"": [3], " in evaluation": [4], " in a save": with_intervals}[where] == saved(recipe)
    assert (newest(recipe).path.name, newest(recipe).state.world_size) == (step_name(last), 2)
    assert fleet.train(settings(*sharded), ranks=2) == [0, 0]
    assert_same_tensors(newest(tiny("run.name=whole")), newest(recipe))


# What the survivor says: its own rank, the step, and who is missing. gloo notices a death at once, a hang at the
# timeout; a part of a checkpoint that does not come is noticed by whoever waits for it.
LATE = "step-00000003: rank 1 did not deliver its part"
LOST = {
    "in backward": r"rank 0, step 3: {what}; no sign of rank 1 ",
    "in evaluation": r"rank 0, after step 4: {what}; no sign of rank 1 ",
    "in a save": r"rank 0, (after )?step \d: {what}; no sign of rank 1 |" + LATE,
    "in a save that is waited for": r"rank 0, after step 6: {what}; no sign of rank 1 |" + LATE,
}


@pytest.mark.parametrize("where", LOST)
def test_fault_72_a_rank_that_dies_ends_the_other_which_names_it_and_the_step(
    where: str, fleet: Fleet, tiny: Tiny, settings: Callable[..., list[str]]
) -> None:
    sharded = ("parallel.strategy=zero1", "checkpoint.interval=3")
    fault = f"rank 1 dies {where}"
    assert fleet.train(settings(*sharded), ranks=2, fault=fault) == [1, -signal.SIGKILL], fleet.said()
    assert re.search(LOST[where].format(what="the connection broke"), fleet.said()), fleet.said()
    assert "Traceback" not in fleet.said()
    assert fleet.train(settings(*sharded), ranks=2) == [0, 0], fleet.said()
    assert newest(tiny(*sharded)).state.step == 10


def test_fault_72_a_first_rank_that_dies_while_it_looks_where_to_begin_ends_the_other(
    fleet: Fleet, settings: Callable[..., list[str]]
) -> None:
    assert fleet.train(settings(), ranks=2, fault="rank 0 dies at the start") == [-signal.SIGKILL, 1]
    assert fleet.said() == "rank 1, between steps: the connection broke; no sign of rank 0 in 2 s more\n"


@pytest.mark.parametrize("where", LOST)
def test_fault_73_a_rank_that_hangs_is_named_with_the_step_at_the_timeout(
    where: str, fleet: Fleet, tiny: Tiny, settings: Callable[..., list[str]]
) -> None:
    options = ("parallel.strategy=zero1", "checkpoint.interval=3", f"parallel.timeout_s={TIMEOUT_S}")
    waiting, hanging = fleet.start(settings(*options), ranks=2, fault=f"rank 1 hangs {where}")
    assert ends([waiting]) == [1], fleet.said()
    assert re.search(LOST[where].format(what="no answer within 2 s"), fleet.said()), fleet.said()
    assert "Traceback" not in fleet.said()
    assert hanging.is_alive() or where.startswith("in a save")  # the loop of rank 1 went on, and lost rank 0


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("model.d_ff=48", "model differs"),
        ("model.num_layers=2", "model differs"),
        ("optimizer.lr=0.5", "recipe or data differs"),
        ("run.seed=9", "recipe or data differs"),
    ],
)
def test_fault_74_another_model_or_recipe_on_one_rank_is_an_error_at_the_start(
    change: str, what: str, fleet: Fleet, tiny: Tiny, settings: Callable[..., list[str]]
) -> None:
    assert fleet.train(settings(), ranks=2, of_rank_1=[change]) == [1, 1], fleet.said()
    assert fleet.said().count(f"rank 1: {what} from rank 0's") == 2, fleet.said()
    assert losses(tiny()) == []
    assert saved(tiny()) == []


def test_fault_75_evaluation_batches_that_do_not_divide_by_the_ranks(
    fleet: Fleet, tiny: Tiny, settings: Callable[..., list[str]]
) -> None:
    """Three batches on two ranks, and at the end all 23, of which the last is shorter."""
    uneven = ("train.eval_batches=3", "train.steps=4")
    assert fleet.train(settings(*uneven, "run.name=one")) == [0], fleet.said()
    assert fleet.train(settings(*uneven, "run.name=two"), ranks=2) == [0, 0], fleet.said()
    for kind in ("valid", "final"):
        ((_, single),) = losses(tiny("run.name=one"), kind)
        ((_, double),) = losses(tiny("run.name=two"), kind)
        assert double == pytest.approx(single, rel=2e-6)  # as above: sums in another order


def test_an_exception_on_one_rank_inside_backward_is_no_hang_and_the_next_run_is_clean(
    fleet: Fleet, tiny: Tiny, settings: Callable[..., list[str]]
) -> None:
    assert fleet.train(settings(), ranks=2, fault="rank 1 raises in backward") == [1, 1], fleet.said()
    assert "rank 0, step 3: the connection broke; no sign of rank 1" in fleet.said()
    assert "ZeroDivisionError: in the middle of backward" in fleet.said()
    assert fleet.train(settings(), ranks=2) == [0, 0], fleet.said()
    assert fleet.train(settings("run.name=fresh"), ranks=2) == [0, 0], fleet.said()
    assert losses(tiny()) == losses(tiny("run.name=fresh"))
