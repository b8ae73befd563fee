"""What a run reports: records, and the sinks they go to.

A record is one JSON object with a `kind`:

- `train`: step, loss (of this step's whole batch, nats per token), lr, grad_norm, tokens (so far),
  tokens_per_second, mfu, memory_bytes (peak), seconds (trained so far), progress (share of the schedule),
  eta_seconds.
- `valid` and `final`: step, loss, perplexity, bits_per_byte, tokens (evaluated on); `final` is over all of the
  held-out tokens.
- `checkpoint`: step, stall_seconds (what saving has cost the loop so far).
- `skip`: step, loss: a step left out because its loss or gradient was not finite.
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
    """Where records go. Ranks other than the first have none."""

    def record(self, record: Record) -> None:
        """Take one record."""

    def note(self, text: str) -> None:
        """Take one line for people."""

    def close(self) -> None:
        """No more records come."""


class Fanout:
    """Hands everything to each of several sinks, in order."""

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
    """`metrics.jsonl`: one record a line, on disk (in the system's cache) when `record` returns.

    Args:
        after_step: go on from this step; later records of an earlier session, and a line that a kill cut
            short, are dropped, so that every step is there once.
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
                f"{self._path}: {reason(error)}",
                hint="make room, then train again to go on from the newest checkpoint",
            ) from error

    def note(self, text: str) -> None:
        """Text is for people."""

    def close(self) -> None:
        self._file.close()


def _line(record: Record) -> str:
    plain = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }
    return json.dumps(plain, allow_nan=False) + "\n"


def read_metrics(path: Path) -> list[Record]:
    """The whole, readable records of a metrics file; [] if there is none. Other lines are passed over."""
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


_LONGEST_LINE = 1 << 20  # bytes; the rest of a longer one is looked at as another line


_LOSSES = ("train", "valid", "final")


def _is_record(record: Any) -> bool:
    """Whether it is one that `record` could have written: a kind, a step, and plain values."""
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
