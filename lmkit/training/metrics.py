"""Define the records that a run reports, and the sinks: `metrics.jsonl`, the console, W&B and TensorBoard.

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
import queue
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from lmkit.errors import LmkitError, reason, some_of
from lmkit.measure.plots import loss_curve
from lmkit.measure.tables import json_lines
from lmkit.recipe.run_folder import METRICS, WANDB
from lmkit.recipe.schema import Recipe
from lmkit.storage import write_atomic
from lmkit.storage.inputs import open_input, read_object
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


class Fanout(Sink):
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


def open_sink(recipe: Recipe, *, after_step: int) -> Fanout:
    """Open metrics.jsonl, the console and, where the recipe says so, W&B and TensorBoard.

    Args:
        after_step: the step from which the session goes on.
    """
    assert recipe.train is not None
    folder = recipe.run.path
    file = MetricsFile(folder / METRICS, after_step=after_step)
    sinks: list[Sink] = [file, console(recipe.train.steps, first_step=after_step)]
    if recipe.wandb.enabled:
        sinks.append(wandb_sink(recipe, folder, after_step=after_step))
    if recipe.train.tensorboard:
        sinks.append(tensorboard_sink(folder, after_step=after_step))
    return Fanout(sinks)


# metrics.jsonl


class MetricsFile(Sink):
    """Write `metrics.jsonl`, one record a line. A record is in the file when `record` returns.

    Args:
        after_step: keep the records up to this step. Later ones of an earlier session, and a line that a kill cut
            short, are dropped, so that the file has every step once.
    """

    def __init__(self, path: Path, *, after_step: int) -> None:
        self._path = path
        kept = [record for record in read_metrics(path) if record["step"] <= after_step]
        write_atomic(path, json_lines(kept))
        self._file: IO[str] = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)

    def record(self, record: Record) -> None:
        try:
            self._file.write(json_lines([record]))
            self._file.flush()
        except OSError as error:
            raise LmkitError(
                "train.io",
                f"{self._path}: {reason(error)}",
                hint="make room, then train again to resume from the newest checkpoint",
            ) from error

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[Record]:
    """Return the valid records of a metrics file, [] if there is none. Others are skipped, and named in the log."""
    if not path.exists():
        return []
    records, mistakes = check_metrics(path)
    if wrong := [text for text in mistakes if CUT not in text]:  # a kill cuts the last line short
        log.warning("%s: not what lmkit writes, and skipped: %s", path, some_of(wrong))
    return records


def check_metrics(path: Path) -> tuple[list[Record], list[str]]:
    """Return the valid records of a metrics file; and for each other line, `line 3 (what is wrong)`."""
    records, mistakes = [], []
    with open_input(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), start=1):
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
    records = read_metrics(folder / METRICS)
    for kind, label in _CURVES.items():
        if points := [(record["step"], record["loss"]) for record in records if record["kind"] == kind]:
            series[label] = points
    if series:
        marked = (_CURVES["valid"], _CURVES["final"])
        write_atomic(folder / LOSS_PICTURE, loss_curve(series, title=title, marked=marked))


# The console


class PlainConsole(Sink):
    """Print one line per record to stderr, at most one a second for training steps; the first and last always."""

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps
        self._last = -SECONDS_BETWEEN_LINES

    def record(self, record: Record) -> None:
        now = time.monotonic()
        if record["kind"] == "train":
            if now - self._last < SECONDS_BETWEEN_LINES and record["step"] < self._total:
                return
            self._last = now
        if text := describe(record, self._total):
            self.note(text)

    def note(self, text: str) -> None:
        print(harmless(text, sys.stderr), file=sys.stderr, flush=True)


class BarConsole(Sink):
    """Show a bar with the newest numbers; notes and evaluations scroll above it.

    Args:
        first_step: the step from which the session goes on.
    """

    def __init__(self, total_steps: int, *, first_step: int = 0) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        self._total = total_steps
        self._progress = Progress(
            BarColumn(bar_width=None, table_column=Column(max_width=24)),  # the room that the numbers leave
            TextColumn("{task.fields[numbers]}", markup=False),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task("train", total=1.0, numbers=f"step {first_step}/{total_steps}")
        self._progress.update(self._task, completed=first_step / total_steps)
        self._progress.start()

    def record(self, record: Record) -> None:
        text = describe(record, self._total)
        if record["kind"] == "train":
            if len(text) + 1 + _SHORTEST_BAR > self._progress.console.width:
                text = text.replace("  ", " ")
            self._progress.update(self._task, completed=record["progress"], numbers=text)
        elif text:
            self.note(text)

    def note(self, text: str) -> None:
        self._progress.console.print(harmless(text, sys.stderr), markup=False, highlight=False)

    def close(self) -> None:
        self._progress.stop()


def console(total_steps: int, *, first_step: int = 0) -> PlainConsole | BarConsole:
    """Return the display that fits stderr."""
    if wants_plain_text(sys.stderr):
        return PlainConsole(total_steps)
    return BarConsole(total_steps, first_step=first_step)


def describe(record: Record, total_steps: int) -> str:
    """Return a record as one line of at most 100 columns, a text in its lines; "" for kinds that are only for the
    file."""
    kind, step = record["kind"], f"step {record['step']}/{total_steps}"
    if kind == "train":
        parts = [
            step,
            f"loss {_digits(record['loss'], 5)}",
            f"lr {record['lr']:.1e}".replace("e-0", "e-"),
            f"norm {_digits(record['grad_norm'], 3)}",
            f"{_rate(record['tokens_per_second'])} tok/s",
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
    return (
        f"{step}  skipped: loss {record['loss']:.4f}, loss or gradient {record.get('why', 'not finite')}"
        if kind == "skip"
        else ""
    )


def _digits(value: float, digits: int) -> str:
    """Format with that many digits: with 3, `1.50`, `12.3`, `123`."""
    return f"{value:#.{digits}g}".rstrip(".")


def _rate(value: float) -> str:
    """Format as `1,234`, `12.3k`, `8.77M`."""
    if value < 1e4:
        return f"{value:,.0f}"
    return f"{_digits(value / 1e3, 3)}k" if value < 1e6 else f"{_digits(value / 1e6, 3)}M"


def duration(seconds: float) -> str:
    """Format seconds: `75` -> `1:15`, `3675` -> `1:01:15`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


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
