"""Show the progress of a run on stderr: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import IO, Any

from lmkit.measure.progress import wants_plain_text
from lmkit.training.metrics import Record

SECONDS_BETWEEN_LINES = 1.0
_SHORTEST_BAR = 4
"""Columns that rich gives to a bar at least."""


class PlainConsole:
    """Print one line per record, at most one a second for training steps; the first and last always."""

    def __init__(self, total_steps: int, *, stream: IO[str] | None = None) -> None:
        self._total = total_steps
        self._stream = stream or sys.stderr
        self._last = -SECONDS_BETWEEN_LINES

    def record(self, record: Record) -> None:
        now = time.monotonic()
        if record["kind"] == "train":
            if now - self._last < SECONDS_BETWEEN_LINES and record["step"] < self._total:
                return
            self._last = now
        text = describe(record, self._total)
        if text:
            self.note(text)

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Do nothing: no resource is open."""


class BarConsole:
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
        self._progress.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._progress.stop()


def console(total_steps: int, *, first_step: int = 0) -> PlainConsole | BarConsole:
    """Return the display that fits stderr."""
    if wants_plain_text(sys.stderr):
        return PlainConsole(total_steps)
    return BarConsole(total_steps, first_step=first_step)


def describe(record: Record, total_steps: int) -> str:
    """Return a record as one line of text; "" for kinds that are only for the file."""
    formatter = _FORMATTERS.get(record["kind"])
    return "" if formatter is None else formatter(record, total_steps)


def _train(record: Record, total_steps: int) -> str:
    """Return a line of at most 100 columns, also with 7-digit steps, millions of tokens/s and MFU."""
    parts = [
        f"step {record['step']}/{total_steps}",
        f"loss {_digits(record['loss'], 5)}",
        f"lr {record['lr']:.1e}".replace("e-0", "e-"),
        f"norm {_digits(record['grad_norm'], 3)}",
        f"{_rate(record['tokens_per_second'])} tok/s",
    ]
    if record["mfu"] is not None:
        parts.append(f"MFU {100 * record['mfu']:.1f}%")
    parts.append(f"{_digits(record['memory_bytes'] / 1e9, 3)} GB")
    parts.append(f"{_remaining(record['eta_seconds'])} left")
    return "  ".join(parts)


def _valid(record: Record, total_steps: int) -> str:
    what = "all held-out data" if record["kind"] == "final" else "held out"
    bits = record["bits_per_byte"]
    return (
        f"step {record['step']}/{total_steps}  {what}: loss {record['loss']:.4f}  "
        f"perplexity {record['perplexity']:.2f}" + ("" if bits is None else f"  {bits:.4f} bits per byte")
    )


def _skip(record: Record, total_steps: int) -> str:
    return f"step {record['step']}/{total_steps}  skipped: loss {record['loss']}, the gradient is not finite"


_FORMATTERS: dict[str, Callable[[dict[str, Any], int], str]] = {
    "train": _train,
    "valid": _valid,
    "final": _valid,
    "skip": _skip,
}


def _digits(value: float, digits: int) -> str:
    """Format with that many digits, for values from 1: with 3, `1.50`, `12.3`, `123`. NaN stays `nan`."""
    whole = 1 + sum(abs(value) >= 10**power for power in range(1, digits))
    return f"{value:.{digits - whole}f}"


def _rate(value: float) -> str:
    """Format as `1,234`, `12.3k`, `8.77M`."""
    if value < 1e4:
        return f"{value:,.0f}"
    return f"{_digits(value / 1e3, 3)}k" if value < 1e6 else f"{_digits(value / 1e6, 3)}M"


def _remaining(seconds: float) -> str:
    """Format as `1:15`, `1h05m`, `124h`: an estimate of hours needs no seconds."""
    if seconds < 3600:
        return duration(seconds)
    if seconds < 36000:
        return "{}h{:02d}m".format(*divmod(round(seconds / 60), 60))
    return f"{seconds / 3600:.0f}h"


def duration(seconds: float) -> str:
    """Format seconds: `75` -> `1:15`, `3675` -> `1:01:15`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
