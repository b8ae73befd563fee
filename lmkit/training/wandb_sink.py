"""Weights & Biases beside metrics.jsonl. Whatever goes wrong there, training goes on.

All calls are made in a thread of their own: a service that is slow, hangs or dies costs the loop nothing.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError  # noqa: A004 (before Python 3.11 not the built-in one)
from pathlib import Path
from typing import Any

from lmkit.recipe.schema import Recipe
from lmkit.training.metrics import Record

log = logging.getLogger("lmkit")

START_TIMEOUT_S = 30
FINISH_TIMEOUT_S = 60


class WandbSink:
    """Sends the numbers of every record. At the first failure it says so once and falls silent.

    Everything lies in metrics.jsonl anyway, and `wandb sync` can upload an offline run later.
    """

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self._service = _Service()
        self._is_on = True
        self._sent: list[Future[Any]] = []
        start = self._service.submit(lambda: _start(recipe, folder))
        if self._went_well(start, START_TIMEOUT_S + 5, "starting"):
            self._run = start.result()

    def record(self, record: Record) -> None:
        self._sent = [
            call for call in self._sent if not (call.done() and self._went_well(call, 0, "logging"))
        ]
        if not self._is_on:
            return
        numbers = {
            f"{record['kind']}/{key}": value
            for key, value in record.items()
            if isinstance(value, (int, float)) and key != "step"
        }
        run, step = self._run, record["step"]
        self._sent.append(self._service.submit(lambda: run.log(numbers, step=step)))

    def note(self, text: str) -> None:
        """Text is for people at the terminal."""

    def close(self) -> None:
        """Let it upload what is left, for a minute at most: with a dead network it would wait for ever."""
        if self._is_on:
            self._sent.append(self._service.submit(self._run.finish))
        for call in self._sent:
            if self._is_on:
                self._went_well(call, FINISH_TIMEOUT_S, "uploading")
        self._is_on = False

    def _went_well(self, call: Future[Any], timeout: float, doing: str) -> bool:
        try:
            error = call.exception(timeout)
        except TimeoutError:
            self._give_up(f"still {doing} after {timeout:g} s")
            return False
        if isinstance(error, ModuleNotFoundError):
            self._give_up("the package is not installed (pip install 'lmkit[wandb]')")
        elif error is not None:
            self._give_up(repr(error))
        return error is None

    def _give_up(self, reason: str) -> None:
        if self._is_on:
            log.warning("W&B is off: %s; metrics.jsonl has everything", reason)
        self._is_on = False


def _start(recipe: Recipe, folder: Path) -> Any:
    import wandb

    return wandb.init(
        project=recipe.wandb.project,
        name=recipe.run.name,
        dir=str(folder),
        mode=recipe.wandb.mode,
        config=recipe.model_dump(mode="json"),
        settings=wandb.Settings(init_timeout=START_TIMEOUT_S, silent=True),
    )


class _Service(threading.Thread):
    """Makes calls one after the other; does not keep the process alive."""

    def __init__(self) -> None:
        super().__init__(name="lmkit-wandb", daemon=True)
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self.start()

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        call: Future[Any] = Future()
        self._calls.put((function, call))
        return call

    def run(self) -> None:
        while True:
            function, call = self._calls.get()
            try:
                call.set_result(function())
            except BaseException as error:  # noqa: BLE001 (handed to whoever looks at the call, as executors do)
                call.set_exception(error)
