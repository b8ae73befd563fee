"""Runs in processes of their own, one per rank, with faults."""

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
from lmkit.training import session


def live(
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
        tell_whether_a_refused_update_changed_weights(rank)
        tell_the_ranks()
        FAULTS[fault](rank)
    session.draw_losses = lambda *arguments, **keywords: None  # type: ignore[assignment]
    sys.stderr = open(log, "a")  # noqa: SIM115
    try:
        session.train(load_recipe(recipe, settings), **options)
    except LmkitError as error:
        print(f"{error.code} | {error.message}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)
    except KeyboardInterrupt:
        os._exit(130)


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
            environment = {**place, RENDEZVOUS_VARIABLE: meeting} if ranks > 1 else {}
            own = [*settings, *(of_rank_1 if rank == 1 else ())]
            process = self._context.Process(  # type: ignore[attr-defined]
                target=live, args=(own, recipe, environment, fault, str(self.log), options)
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
