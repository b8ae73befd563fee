"""Send the records of a run to Weights & Biases and to TensorBoard."""

from __future__ import annotations

import json
import logging
import queue
import secrets
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lmkit.recipe.recipe import Recipe
from lmkit.recipe.run_folder import WANDB, object_in
from lmkit.storage.atomic import write_atomic
from lmkit.training.metrics import Record, Sink

log = logging.getLogger("lmkit")
START_TIMEOUT_S = 30
FINISH_TIMEOUT_S = 60
EVENTS = "tensorboard"


def wandb_sink(recipe: Recipe, folder: Path, *, after_step: int = 0) -> ServiceSink:
    """Return the sink of Weights & Biases. After step 0 it goes on with W&B's run of the earlier session, unless the
    run folder is a copy of another name."""

    def start() -> Any:
        import wandb

        ours = {"project": recipe.wandb.project, "name": recipe.run.name}
        noted = object_in(folder / WANDB)
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
    """Return the sink of TensorBoard, which drops what an earlier session wrote after `after_step`."""

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

    A thread makes all calls, so that a slow or dead service costs training no time, and does not keep the process
    alive. metrics.jsonl has everything.

    Args:
        start: returns W&B's run, or what has its methods `log` and `finish`.
        extra: the extra of lmkit that installs the service's package.
    """

    def __init__(self, name: str, start: Callable[[], Any], *, extra: str) -> None:
        self._name, self._extra = name, extra
        self._values: queue.SimpleQueue[tuple[int, dict[str, float | str]] | None] = queue.SimpleQueue()
        self._is_on, self._started, self._ended = True, threading.Event(), threading.Event()
        threading.Thread(target=self._serve, args=(start,), name=f"lmkit {name}", daemon=True).start()
        if not self._started.wait(START_TIMEOUT_S + 5):
            self._give_up(f"still starting after {START_TIMEOUT_S + 5} s")

    def record(self, record: Record) -> None:
        values: dict[str, float | str] = {
            f"{record['kind']}/{key}": value
            for key, value in record.items()
            if isinstance(value, (int, float)) and key != "step"
        }
        if record["kind"] == "sample":  # a step may have several
            values = {f"sample/{record['number'] + 1}": record["text"]}
        if self._is_on:
            self._values.put((record["step"], values))

    def close(self) -> None:
        """Upload the rest, for a minute at most: with a dead network a service may wait for ever."""
        self._values.put(None)
        if self._is_on and not self._ended.wait(FINISH_TIMEOUT_S):
            self._give_up(f"still uploading after {FINISH_TIMEOUT_S:g} s")

    def _serve(self, start: Callable[[], Any]) -> None:
        try:
            run = start()
            self._started.set()
            while (found := self._values.get()) is not None:
                run.log(found[1], step=found[0])
            run.finish()
        except ModuleNotFoundError:
            self._give_up(f"the package is not installed (pip install 'lmkit[{self._extra}]')")
        except BaseException as error:  # noqa: BLE001 (nothing that a service does ends a training)
            self._give_up(repr(error))
        finally:
            self._started.set()
            self._ended.set()

    def _give_up(self, why: str) -> None:
        if self._is_on:
            log.warning("%s is off: %s; metrics.jsonl has everything", self._name, why)
        self._is_on = False
