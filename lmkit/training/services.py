"""Send the numbers and texts of a run to W&B and TensorBoard, whose failures never end a training."""

from __future__ import annotations

import json
import logging
import queue
import secrets
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, TimeoutError  # noqa: A004 (before Python 3.11 not the built-in one)
from contextlib import suppress
from pathlib import Path
from typing import Any

from lmkit.recipe.run_folder import WANDB
from lmkit.recipe.schema import Recipe
from lmkit.storage import write_atomic
from lmkit.storage.inputs import read_object
from lmkit.training.metrics import Record, Sink

START_TIMEOUT_S = 30
FINISH_TIMEOUT_S = 60
EVENTS = "tensorboard"

log = logging.getLogger("lmkit")


def wandb_sink(recipe: Recipe, folder: Path, *, after_step: int = 0) -> ServiceSink:
    """Return the sink of Weights & Biases. `wandb sync` can upload an offline run later.

    Args:
        after_step: > 0: go on with W&B's run of the earlier session, unless the run folder is a copy of another name.
    """

    def start() -> Any:
        import wandb

        ours = {"project": recipe.wandb.project, "name": recipe.run.name}
        noted: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            noted = read_object(folder / WANDB)
        goes_on = after_step > 0 and noted == ours | {"id": noted.get("id")} and isinstance(noted["id"], str)
        ours["id"] = noted["id"] if goes_on else secrets.token_hex(8)
        write_atomic(folder / WANDB, json.dumps(ours) + "\n")
        return wandb.init(
            **ours,
            resume="allow",
            dir=str(folder),
            mode=recipe.wandb.mode,
            config=recipe.model_dump(mode="json"),
            settings=wandb.Settings(init_timeout=START_TIMEOUT_S, silent=True),
        )

    return ServiceSink("W&B", start, extra="wandb")


def tensorboard_sink(folder: Path, *, after_step: int) -> ServiceSink:
    """Return the sink of TensorBoard, whose files lie in `tensorboard` in the run folder.

    Args:
        after_step: TensorBoard drops what an earlier session wrote of later steps.
    """

    def start() -> Any:
        from torch.utils.tensorboard import SummaryWriter

        return _Events(SummaryWriter(str(folder / EVENTS), purge_step=after_step + 1))

    return ServiceSink("TensorBoard", start, extra="tensorboard")


class _Events:
    """A writer of event files, with the methods of W&B's run."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log(self, values: Mapping[str, float | str], *, step: int) -> None:
        for name, value in values.items():
            add = self._writer.add_text if isinstance(value, str) else self._writer.add_scalar
            add(name, value, step)

    def finish(self) -> None:
        self._writer.close()


class ServiceSink(Sink):
    """Send the numbers and texts of every record to a service. At the first failure log one warning and stop.

    All calls are made in a thread of their own, so that a slow or dead service costs training no time. metrics.jsonl
    has everything.

    Args:
        start: returns W&B's run, or what has its methods `log` and `finish`.
        extra: the extra of lmkit that installs the service's package.
    """

    def __init__(self, name: str, start: Callable[[], Any], *, extra: str) -> None:
        self._name, self._extra = name, extra
        self._caller = _Caller(name)
        self._is_on = True
        self._sent: list[Future[Any]] = []
        begin = self._caller.submit(start)
        if self._went_well(begin, START_TIMEOUT_S + 5, "starting"):
            self._run = begin.result()

    def record(self, record: Record) -> None:
        self._sent = [
            call for call in self._sent if not (call.done() and self._went_well(call, 0, "logging"))
        ]
        if not self._is_on:
            return
        values: dict[str, float | str] = {
            f"{record['kind']}/{key}": value
            for key, value in record.items()
            if isinstance(value, (int, float)) and key != "step"
        }
        if record["kind"] == "sample":  # a step may have several
            values = {f"sample/{record['number'] + 1}": record["text"]}
        run, step = self._run, record["step"]
        self._sent.append(self._caller.submit(lambda: run.log(values, step=step)))

    def close(self) -> None:
        """Upload the rest, for a minute at most: with a dead network a service may wait for ever."""
        if self._is_on:
            self._sent.append(self._caller.submit(self._run.finish))
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
            self._give_up(f"the package is not installed (pip install 'lmkit[{self._extra}]')")
        elif error is not None:
            self._give_up(repr(error))
        return error is None

    def _give_up(self, why: str) -> None:
        if self._is_on:
            log.warning("%s is off: %s; metrics.jsonl has everything", self._name, why)
        self._is_on = False


class _Caller(threading.Thread):
    """Make calls one after the other, in a thread that does not keep the process alive, as an executor's would."""

    def __init__(self, name: str) -> None:
        super().__init__(name=f"lmkit {name}", daemon=True)
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
            except BaseException as error:  # noqa: BLE001 (the call holds it, as with executors)
                call.set_exception(error)
