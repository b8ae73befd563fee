"""Show progress on stderr: a bar on a terminal, else a line every ten seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lmkit.measure.progress import Progress, wants_plain_text

SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def progress_on_stderr() -> Iterator[Progress]:
    """Yield a `Progress` that draws on stderr while the block runs."""
    if wants_plain_text(sys.stderr):
        yield _lines()
        return
    with _bar() as report:
        yield report


@contextmanager
def _bar() -> Iterator[Progress]:
    """Draw one bar at a time, for the stage that was reported last, until it is done."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    bars = Bars(*columns, console=Console(stderr=True), transient=True)

    def report(stage: str, done: int, total: int) -> None:
        for task in bars.tasks:
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


def _lines() -> Progress:
    started: dict[str, float] = {}
    last: dict[str, float] = {}

    def report(stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        begin = started.setdefault(stage, now)
        if now - last.setdefault(stage, begin) < SECONDS_BETWEEN_LINES or not 0 < done < total:
            return
        last[stage] = now
        left = (now - begin) * (total - done) / done
        print(f"{stage}: {100 * done / total:.0f}%, {left:.0f} s left", file=sys.stderr)

    return report
