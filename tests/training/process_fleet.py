"""Runs in processes of their own: killed, signalled, several ranks.

The processes come from a fork server that has imported torch already (see conftest), so that each takes a fraction
of a second; the signals, locks, files and collectives are real.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from process_faults import FAULTS, PATIENCE_S, tell_the_ranks, tell_whether_a_refused_update_changed_weights

from lmkit.errors import LmkitError
from lmkit.parallel.ranks import RENDEZVOUS_VARIABLE, hosted_store
from lmkit.recipe.load import load_recipe
from lmkit.recipe.schema import Recipe
from lmkit.training import session
from lmkit.training.checkpoint import Checkpoint, newest_valid, open_checkpoint


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
        tell_whether_a_refused_update_changed_weights(rank)
        tell_the_ranks()
        FAULTS[fault](rank)
    session.draw_losses = lambda *arguments, **keywords: None  # type: ignore[assignment]
    sys.stderr = open(options.pop("log"), "a")  # noqa: SIM115
    try:
        session.train(load_recipe(None, settings), **options)
    except LmkitError as error:
        print(error.message, file=sys.stderr, flush=True)
        os._exit(error.exit_code)
    except KeyboardInterrupt:
        os._exit(130)


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
