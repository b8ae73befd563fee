"""What commands print: results on stdout, the log and progress on stderr."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

from lmkit.streams import Progress, harmless, results, wants_plain_text

SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True)
class Result:
    """The result of a command: a text for people, and fields for `--json`; the exit code is 1 if it is not fine."""

    text: str
    fields: dict[str, Any]
    is_fine: bool = True


def show(result: Any, *, as_json: bool) -> None:
    """Print a `Result` or a dataclass: its text, or its fields as one JSON object."""
    if as_json:
        import json  # not for --help

        from lmkit.measure.tables import finite

        fields = result.fields if isinstance(result, Result) else asdict(result)
        write(json.dumps(finite(fields), default=str, allow_nan=False) + "\n")
    else:
        text = result.text if isinstance(result, Result) else str(result)
        write(text if text.endswith("\n") else text + "\n")


def write(text: str) -> None:
    """Write text to stdout at once; under torchrun, only on rank 0."""
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK") != "0":
        return
    stream = results()
    stream.write(harmless(text, stream))
    stream.flush()


def log_to_stderr() -> None:
    """Send the log of library code (logger "lmkit") to stderr as plain lines."""
    import logging  # 9 ms

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = harmless(self.format(record), sys.stderr)
            if record.levelno >= logging.WARNING:
                text = f"{record.levelname.lower()}: {text}"
            with suppress(OSError, ValueError):  # stderr is full or closed
                print(text, file=sys.stderr, flush=True)  # above a bar while one is drawn

    log = logging.getLogger("lmkit")
    log.setLevel(logging.INFO)
    log.propagate = False
    log.handlers = [Lines()]


@contextmanager
def progress_on_stderr() -> Iterator[Progress]:
    """Yield a `Progress` for the block: a bar on a terminal, else a line every ten seconds."""
    if wants_plain_text(sys.stderr):
        times: dict[str, tuple[float, float]] = {}  # of a stage: its first report, and its last line

        def print_line(stage: str, done: int, total: int) -> None:
            now = time.monotonic()
            begin, last = times.setdefault(stage, (now, now))
            if now - last >= SECONDS_BETWEEN_LINES and 0 < done < total:
                times[stage] = begin, now
                left = (now - begin) * (total - done) / done
                print(f"{stage}: {100 * done / total:.0f}%, {left:.0f} s left", file=sys.stderr)

        yield print_line
        return
    from rich import progress
    from rich.console import Console

    bars = progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TaskProgressColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("left"),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )

    def report(stage: str, done: int, total: int) -> None:
        for task in bars.tasks:  # one bar at a time, for the stage that was reported last
            if task.description != stage:
                bars.remove_task(task.id)
        if done >= total:  # leaves the terminal to the next stage, which may draw its own bar
            bars.stop()
            return
        if not bars.tasks:
            bars.add_task(stage)
        bars.update(bars.task_ids[0], completed=done, total=total)
        bars.start()

    try:
        yield report
    finally:
        bars.stop()
