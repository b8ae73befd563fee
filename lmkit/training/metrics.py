"""Define the records that a run reports, and the sinks that take them: `metrics.jsonl` and W&B.

A record is one JSON object with a `kind`:

- `train`: step, loss (of this step's whole batch, nats per token), lr, grad_norm, tokens (so far),
  tokens_per_second, mfu, memory_bytes (peak), seconds (trained so far), progress (share of the schedule),
  eta_seconds.
- `valid` and `final`: step, loss, perplexity, bits_per_byte, tokens (evaluated on); `final` is over all held-out
  tokens.
- `checkpoint`: step, stall_seconds (how long training has waited for saving so far).
- `skip`: step, loss; the step was skipped because its loss or gradient was not finite.
"""

from __future__ import annotations

import json
import logging
import math
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError  # noqa: A004 (before Python 3.11 not the built-in one)
from pathlib import Path
from typing import IO, Any, Protocol

from lmkit.errors import LmkitError, reason
from lmkit.recipe.schema import Recipe
from lmkit.storage import write_atomic

METRICS = "metrics.jsonl"
Record = dict[str, Any]


class Sink(Protocol):
    """Take the records of a run. Only rank 0 has sinks."""

    def record(self, record: Record) -> None:
        """Take a record."""

    def note(self, text: str) -> None:
        """Take a line of text for people."""

    def close(self) -> None:
        """End: no more records come."""


class Fanout:
    """Pass everything to each of several sinks, in order."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks

    def record(self, record: Record) -> None:
        for sink in self._sinks:
            sink.record(record)

    def note(self, text: str) -> None:
        for sink in self._sinks:
            sink.note(text)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


class MetricsFile:
    """Write `metrics.jsonl`, one record a line. A record is in the file when `record` returns.

    Args:
        after_step: keep the records up to this step. Later ones of an earlier session, and a line that a kill cut
            short, are dropped, so that the file has every step once.
    """

    def __init__(self, path: Path, *, after_step: int) -> None:
        self._path = path
        kept = [record for record in read_metrics(path) if record["step"] <= after_step]
        write_atomic(path, "".join(_line(record) for record in kept))
        self._file: IO[str] = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)

    def record(self, record: Record) -> None:
        try:
            self._file.write(_line(record))
            self._file.flush()
        except OSError as error:
            raise LmkitError(
                "train.io",
                f"{self._path}: {reason(error)}",
                hint="make room, then train again to resume from the newest checkpoint",
            ) from error

    def note(self, text: str) -> None:
        """Ignore text."""

    def close(self) -> None:
        self._file.close()


def _line(record: Record) -> str:
    plain = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }
    return json.dumps(plain, allow_nan=False) + "\n"


def read_metrics(path: Path) -> list[Record]:
    """Return the valid records of a metrics file, [] if there is none. Other lines are skipped."""
    if not path.exists():
        return []
    records = []
    with open(path, "rb") as file:
        while line := file.readline(_LONGEST_LINE):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if _is_record(record):
                records.append(record)
    return records


_LONGEST_LINE = 1 << 20  # bytes; the rest of a longer line counts as another line


_LOSSES = ("train", "valid", "final")


def _is_record(record: Any) -> bool:
    """Return whether `record` could have written it: a kind, a step, and plain values."""
    return (
        isinstance(record, dict)
        and isinstance(record.get("kind"), str)
        and type(record.get("step")) is int
        and 0 <= record["step"] < 1 << 63
        and not any(isinstance(value, dict | list) for value in record.values())
        and (record["kind"] not in _LOSSES or isinstance(record.get("loss", "missing"), float | None))
    )


log = logging.getLogger("lmkit")


START_TIMEOUT_S = 30


FINISH_TIMEOUT_S = 60


class WandbSink:
    """Send the numbers of every record to Weights & Biases. At the first failure log one warning and stop.

    Training never fails for it. All calls are made in a thread of their own, so that a slow or dead service costs
    training no time. metrics.jsonl has everything; `wandb sync` can upload an offline run later.
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
        """Ignore text."""

    def close(self) -> None:
        """Upload the rest, for a minute at most: with a dead network W&B would wait for ever."""
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
    """Make calls one after the other, in a thread that does not keep the process alive."""

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
            except BaseException as error:  # noqa: BLE001 (the call holds it, as with executors)
                call.set_exception(error)
