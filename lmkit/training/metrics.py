"""Define the records that a run reports, and their sinks: `metrics.jsonl`, the console, W&B, TensorBoard.

A record is one JSON object with a `kind`:

- `train`: step, loss (of this step's whole batch, nats per token), lr, grad_norm, tokens (so far),
  tokens_per_second, mfu, memory_bytes (peak), seconds (trained so far), progress (share of the schedule),
  eta_seconds.
- `valid` and `final`: step, loss, perplexity, bits_per_byte, tokens (evaluated on), bytes_per_token; `final` is over
  all held-out tokens.
- `checkpoint`: step, stall_seconds (how long training has waited for saving so far).
- `sample`: step, number (of the prompt), text (prompt included).
- `skip`: step, loss; the step was skipped because its loss or gradient was not finite.
"""

from __future__ import annotations

import json
import logging
import math
import queue
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from lmkit.errors import some_of
from lmkit.measure.plots import loss_curve
from lmkit.measure.tables import json_lines
from lmkit.recipe.recipe import Recipe
from lmkit.recipe.run_folder import METRICS, WANDB, object_in
from lmkit.storage.atomic import naming, write_atomic
from lmkit.storage.inputs import open_input
from lmkit.streams import harmless, wants_plain_text

LOSS_PICTURE = "loss.png"
SECONDS_BETWEEN_LINES = 1.0
_SHORTEST_BAR = 4
"""The fewest columns that rich gives to a bar."""
_LONGEST_LINE = 1 << 20
"""Bytes; the rest of a longer line counts as another line."""
_CURVES = {"train": "training", "valid": "held out", "final": "all held-out data"}  # kind of record -> label

CUT = "cut short"
"""What is wrong with a last line that a kill cut."""
_TEXTS = ("kind", "text", "why")
_WHOLE = ("step", "tokens", "memory_bytes", "number")
"""Keys whose values are whole numbers; those of the other keys are numbers that JSON has, or None."""
_NEEDED = {**dict.fromkeys(_CURVES, "loss"), "sample": "text"}

Record = dict[str, Any]
log = logging.getLogger("lmkit")


class Sink:
    """Take the records of a run. Only rank 0 has sinks."""

    def record(self, record: Record) -> None:
        """Take a record."""

    def note(self, text: str) -> None:
        """Take a line of text for people."""

    def close(self) -> None:
        """End: no more records come."""


class MetricsFile(Sink):
    """Write `metrics.jsonl`, one record a line, and pass everything to other sinks. A record is in the file when
    `record` returns. What an earlier session wrote after `after_step` is dropped, as is a line that a kill cut short:
    the file has every step once."""

    def __init__(self, path: Path, *, after_step: int, others: Sequence[Sink] = ()) -> None:
        self._path, self._others = path, others
        kept = [record for record in read_metrics(path) if record["step"] <= after_step]
        write_atomic(path, json_lines(kept))
        self._file: IO[str] = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)

    def record(self, record: Record) -> None:
        with naming(self._path):
            self._file.write(json_lines([record]))
            self._file.flush()
        for sink in self._others:
            sink.record(record)

    def note(self, text: str) -> None:
        for sink in self._others:
            sink.note(text)

    def close(self) -> None:
        with naming(self._path):  # it writes what a full disk did not take
            self._file.close()
        for sink in self._others:
            sink.close()


def read_metrics(path: Path) -> list[Record]:
    """Return the valid records of a metrics file, [] if there is none. Others are skipped, and named in the log."""
    if not path.exists():
        return []
    records, mistakes = check_metrics(path)
    if mistakes and CUT in mistakes[-1]:  # a kill cuts the last line short
        mistakes.pop()
    if mistakes:
        log.warning("%s: not what lmkit writes, and skipped: %s", path, some_of(mistakes))
    return records


def check_metrics(path: Path) -> tuple[list[Record], list[str]]:
    """Return the valid records of a metrics file; and for each other line, `line 3 (what is wrong)`."""
    records, mistakes = [], []
    with open_input(path) as file:
        number = 0
        while line := file.readline(_LONGEST_LINE):
            number += 1
            try:
                why = _mistake(record := json.loads(line))
            except (ValueError, RecursionError):
                why = "not JSON" if line.endswith(b"\n") else CUT
            if why is None:
                records.append(record)
            else:
                mistakes.append(f"line {number} ({why})")
    return records, mistakes


def _mistake(record: Any) -> str | None:
    """Return why `record` could not have written it: no kind, no step, or values of other types."""
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str) or "step" not in record:
        return "no record"
    needed = _NEEDED.get(record["kind"], "step")
    if needed not in record:
        return f"no {needed}"
    for key, value in record.items():
        is_number = type(value) in (int, float) and abs(value) < 1 << 63
        if key in _TEXTS:
            is_right = isinstance(value, str)
        elif key in _WHOLE:
            is_right = is_number and type(value) is int and value >= 0
        else:
            is_right = is_number or value is None
        if not is_right:
            return key
    return None


def draw_losses(folder: Path, *, title: str) -> None:
    """Write `loss.png` from the metrics, with a marker at every evaluation; nothing if there are none yet."""
    series: dict[str, list[tuple[int, float]]] = {}
    for record in read_metrics(folder / METRICS):
        if (label := _CURVES.get(record["kind"])) is not None:
            series.setdefault(label, []).append((record["step"], record["loss"]))
    if series:
        marked = (_CURVES["valid"], _CURVES["final"])
        write_atomic(folder / LOSS_PICTURE, loss_curve(series, title=title, marked=marked))


class Console(Sink):
    """Show a run on stderr. On a terminal, a bar has the newest numbers, and notes and evaluations scroll above it.
    Elsewhere, a record is a line; of training steps at most one a second is shown, but always the first and the last.
    """

    def __init__(self, total_steps: int, *, first_step: int = 0) -> None:
        self._total = total_steps
        self._last = -math.inf
        self._bar: Any = None
        if wants_plain_text(sys.stderr):
            return
        from rich.console import Console as Terminal
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        self._bar = Progress(
            BarColumn(bar_width=None, table_column=Column(max_width=24)),  # the room that the numbers leave
            TextColumn("{task.fields[numbers]}", markup=False),
            console=Terminal(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task("train", total=1.0, numbers=f"step {first_step}/{total_steps}")
        self._bar.update(self._task, completed=first_step / total_steps)
        self._bar.start()

    def record(self, record: Record) -> None:
        text, now = describe(record, self._total), time.monotonic()
        if record["kind"] != "train":
            if text:
                self.note(text)
        elif self._bar is not None:
            if len(text) + 1 + _SHORTEST_BAR > self._bar.console.width:
                text = text.replace("  ", " ")
            self._bar.update(self._task, completed=record["progress"], numbers=text)
        elif now - self._last >= SECONDS_BETWEEN_LINES or record["step"] >= self._total:
            self._last = now
            self.note(text)

    def note(self, text: str) -> None:
        text = harmless(text, sys.stderr)
        if self._bar is None:
            print(text, file=sys.stderr, flush=True)
        else:
            self._bar.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def describe(record: Record, total_steps: int) -> str:
    """Return a record as one line of at most 100 columns, a text in its lines; "" for kinds that are only for the
    file."""
    kind, step = record["kind"], f"step {record['step']}/{total_steps}"
    if kind == "train":
        speed = record["tokens_per_second"]
        rate = f"{speed:,.0f}"  # 1,234, then 12.3k and 8.77M
        if speed >= 1e4:
            rate = f"{_digits(speed / 1e3, 3)}k" if speed < 1e6 else f"{_digits(speed / 1e6, 3)}M"
        parts = [
            step,
            f"loss {_digits(record['loss'], 5)}",
            f"lr {record['lr']:.1e}".replace("e-0", "e-"),
            f"norm {_digits(record['grad_norm'], 3)}",
            f"{rate} tok/s",
        ]
        if record["mfu"] is not None:
            parts.append(f"MFU {100 * record['mfu']:.1f}%")
        parts.append(f"{_digits(record['memory_bytes'] / 1e9, 3)} GB")
        parts.append(f"{duration(record['eta_seconds'])} left")
        return "  ".join(parts)
    if kind in _CURVES:
        bits = record["bits_per_byte"]
        return (
            f"{step}  {_CURVES[kind]}: loss {record['loss']:.4f}  perplexity {record['perplexity']:.2f}"
            + ("" if bits is None else f"  {bits:.4f} bits per byte")
        )
    if kind == "sample":  # an untrained model writes control characters by chance
        signs = (sign if sign.isprintable() or sign == "\n" else "\ufffd" for sign in record["text"])
        return f"{step}  text {record['number'] + 1}: {''.join(signs)}"
    if kind == "skip":
        why = record.get("why", "not finite")
        return f"{step}  skipped: loss {record['loss']:.4f}, loss or gradient {why}"
    return ""


def _digits(value: float, digits: int) -> str:
    """Format with that many digits: with 3, `1.50`, `12.3`, `123`."""
    return f"{value:#.{digits}g}".rstrip(".")


def duration(seconds: float) -> str:
    """Format seconds: `75` -> `1:15`, `3675` -> `1:01:15`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


# Other services

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

        writer: Any = SummaryWriter(str(folder / EVENTS), purge_step=after_step + 1)

        def log_values(values: Mapping[str, float | str], *, step: int) -> None:
            for name, value in values.items():
                add = writer.add_text if isinstance(value, str) else writer.add_scalar
                add(name, value, step)

        return SimpleNamespace(log=log_values, finish=writer.close)  # as W&B's run

    return ServiceSink("TensorBoard", start, extra="tensorboard")


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
