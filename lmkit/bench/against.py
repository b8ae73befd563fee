"""`lmkit bench NAME --against PATH`: this version of lmkit beside another one, sample by sample.

Both versions run the whole bench at the same time, each in its own process (`side`). A side announces what it would
time and waits; it takes a sample only when told to, while the other side is idle. The two samples of a pair are
milliseconds apart, so other load on the machine affects both alike. A case ends when its speedup is known closely
enough (`statistics.turns_suffice`). Equal code in two processes still differs by 1 to 3%, because their memory lies
elsewhere; so both sides start `STARTS` times, and each start is one observation.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from lmkit.bench import side
from lmkit.bench.compare import (
    SMALLEST_DIFFERENCE,
    Compared,
    Key,
    Samples,
    compare_rows,
    identity,
    samples_ms,
    stored_rows,
)
from lmkit.errors import LmkitError, UsageError
from lmkit.measure.environment import environment_without_git
from lmkit.measure.progress import Progress
from lmkit.measure.statistics import FEWEST_PAIRS, FEWEST_TURNS, RunRatio, compare_starts, turns_suffice
from lmkit.measure.tables import Rows
from lmkit.storage.inputs import read_input

STARTS = 8
SECONDS_PER_ROW = 1.5  # in each start
MAX_CALLS_PER_SAMPLE = 10_000
# glibc maps large blocks anew or reuses them, depending on what a process freed before: equal code in two processes
# differed by 60%. With these limits both keep what they freed.
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**33),
    "MALLOC_TOP_PAD_": str(2**26),
}
Pairs = dict[str, tuple[Samples, Samples]]


def run_against(
    other: Path, arguments: Sequence[str], output: Path | None, *, seed: int, progress: Progress
) -> Compared:
    """Run a bench with the lmkit of `other` (before) and this one (after) in turns, and compare the rows.

    Args:
        other: a folder that holds another version's folder `lmkit`, or a Python executable that imports it.
        arguments: of `lmkit bench` in both versions: name, recipe, flags.
        output: the folder for the results of both, in `start-1/before`, `start-1/after` and so on; by default they
            are not kept.
        seed: seed of the order within each pair.

    Raises:
        UsageError: `other` is neither.
        LmkitError: a side failed.
    """
    commands = {"before": _command(other), "after": _command(Path(__file__).parents[2])}
    rng = random.Random(seed)
    turns: set[tuple[Any, Any]] = set()
    rows: tuple[list[Rows], list[Rows]] = ([], [])  # before and after, of each start
    with ExitStack() as stack:
        folder = output or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmkit-against-")))
        for number in range(1, STARTS + 1):
            place, label = folder / f"start-{number}", f"start {number} of {STARTS}"
            with ExitStack() as processes:
                sides = [
                    processes.enter_context(_started(name, *command, arguments, place / name))
                    for name, command in commands.items()
                ]
                for case, asked in enumerate(_cases(sides), 1):
                    stage = f"{label}, case {case}, {len(asked[0])} variants"
                    for before, after in _take_turns(sides, asked, rng, stage, progress).values():
                        turns.add((tuple(before), tuple(after)))
                for each, found in zip(sides, rows, strict=True):
                    each.finish()
                    found.append(stored_rows(each.folder))
    old, new = map(_samples_of_starts, rows)

    def in_turns(key: Key) -> RunRatio:
        pairs = [(tuple(before), tuple(after)) for before, after in zip(old[key], new[key], strict=False)]
        if not len(old[key]) == len(new[key]) == STARTS or not turns.issuperset(pairs):
            return RunRatio(math.nan, math.nan, math.nan, "unclear", "not measured in turns in every start")
        return compare_starts(pairs, smallest_difference=SMALLEST_DIFFERENCE)

    pooled = (
        [row | {"samples_ms": list(itertools.chain(*samples[identity(row)]))} for row in found[0]]
        for found, samples in zip(rows, (old, new), strict=True)
    )
    return compare_rows(*pooled, in_turns=in_turns)


def _samples_of_starts(starts: Sequence[Rows]) -> dict[Key, list[Samples]]:
    """Return the samples of each row in each start."""
    found: dict[Key, list[Samples]] = {}
    for row in itertools.chain(*starts):
        found.setdefault(identity(row), []).append(samples_ms(row))
    return found


def _command(path: Path) -> tuple[list[str], dict[str, str]]:
    """Return the Python command of a version and the variables to add to its environment."""
    if (path / "lmkit" / "__main__.py").is_file():
        paths = os.pathsep.join(filter(None, (str(path.resolve()), os.environ.get("PYTHONPATH"))))
        return [sys.executable], {"PYTHONPATH": paths}
    if path.is_file() and os.access(path, os.X_OK):
        return [str(path.absolute())], {"PYTHONPATH": ""}  # not resolved: a link makes a virtual environment
    raise UsageError(
        "bench.against",
        f"--against {path}: neither a folder with another version's lmkit, nor a Python executable",
        hint="make such a folder with: git worktree add ../before main",
    )


class Side:
    """The process of one version."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], link: side.Link, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self._process = process
        self._link = link

    def receive(self) -> Any:
        """Return the next message; None if the process has ended."""
        try:
            return self._link.receive()
        except OSError:
            return None

    def send(self, **message: Any) -> None:
        """Send one message."""
        self._link.send(message)

    def sample_ms(self, variant: str, calls: int, *, keep: bool = True) -> float:
        """Let it take a sample and return ms per call."""
        self.send(variant=variant, calls=calls, keep=keep)
        answer = self.receive()
        if answer is None or "ms" not in answer:
            raise self._failed(f"stopped while it measured {variant}")
        return max(float(answer["ms"]), 1e-9)

    def finish(self) -> None:
        """Wait for the end.

        Raises:
            LmkitError: it left no results.
        """
        self._process.wait()
        if not any(self.folder.glob("*.jsonl")):
            raise self._failed("left no results")

    def _failed(self, what: str) -> LmkitError:
        log = read_input(self.folder.with_suffix(".log")).decode("utf-8", "replace")
        said = [line for line in log.splitlines() if line.strip()][-2:]
        return LmkitError(
            "bench.side_failed",
            f"--against: {self.name} {what}: {' '.join(said) or 'it said nothing'}",
            hint="run the bench with that version alone",
        )


@contextmanager
def _started(
    name: str, python: Sequence[str], environment: Mapping[str, str], arguments: Sequence[str], folder: Path
) -> Iterator[Side]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    ours, theirs = socket.socketpair()
    command = [*python, side.__file__, str(theirs.fileno()), "bench", *arguments, "--output", str(folder)]
    # `python -m lmkit...` in a bench would look into the current folder first, which may hold the other version.
    environment = {**environment_without_git(), **MALLOC, **environment, "PYTHONSAFEPATH": "1"}
    with ours, folder.with_suffix(".log").open("wb") as log:
        with theirs:
            process = subprocess.Popen(
                command, env=environment, pass_fds=[theirs.fileno()], stdout=subprocess.DEVNULL, stderr=log
            )
        link = side.Link(ours)
        try:
            yield Side(name, process, link, folder)
        finally:
            process.kill()
            process.wait()
            link.close()


def _cases(sides: Sequence[Side]) -> Iterator[list[dict[str, float]]]:
    """Yield each case that both sides announce: for each side, variant -> shortest sample in ms.

    When one side ends, the other times its remaining cases alone.
    """
    while True:
        asked = [each.receive() for each in sides]
        if all(asked):
            yield [dict(one["variants"]) for one in asked]
            continue
        for each, one in zip(sides, asked, strict=True):
            if one is None:  # if it failed, there is nothing to compare the other with
                each.finish()
        for each, one in zip(sides, asked, strict=True):
            while one:
                each.send(alone=True)
                one = each.receive()
        return


def _take_turns(
    sides: Sequence[Side],
    asked: Sequence[Mapping[str, float]],
    rng: random.Random,
    stage: str,
    progress: Progress,
) -> Pairs:
    """Take samples of one case until every speedup is known, or the time is over."""
    cpu = rng.choice(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else None
    for each in sides:
        each.send(alone=False, cpu=cpu)
    for each, own, others in zip(sides, asked, reversed(asked), strict=True):
        for variant in own.keys() - others.keys():
            for _ in range(FEWEST_PAIRS):
                each.sample_ms(variant, 1)
    calls: dict[str, int] = {}
    for variant in (variant for variant in asked[0] if variant in asked[1]):
        once = min(each.sample_ms(variant, 1, keep=False) for each in sides)
        wanted = math.ceil(max(one[variant] for one in asked) / once)
        calls[variant] = max(1, min(MAX_CALLS_PER_SAMPLE, wanted))
    pairs: Pairs = {variant: ([], []) for variant in calls}
    left, look_at = list(pairs), FEWEST_TURNS
    end = time.monotonic() + SECONDS_PER_ROW * len(left)
    while left:
        progress(stage, len(pairs) - len(left), len(pairs))
        for _ in range(look_at - len(pairs[left[0]][0])):
            rng.shuffle(left)
            for variant in left:
                for number in rng.sample(range(2), 2):
                    pairs[variant][number].append(sides[number].sample_ms(variant, calls[variant]))
        if time.monotonic() > end:
            break
        left = [
            variant
            for variant in left
            if not turns_suffice(*pairs[variant], smallest_difference=SMALLEST_DIFFERENCE)
        ]
        look_at += max(5, look_at // 8)
    for each in sides:
        each.send(variant=None)
    return pairs
