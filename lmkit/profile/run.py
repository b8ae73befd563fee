"""`lmkit profile`: record training steps or a command, or summarize a recording, and store the results."""

from __future__ import annotations

import gzip
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lmkit.errors import LmkitError, UsageError
from lmkit.measure.environment import describe_environment
from lmkit.measure.plots import grouped_bars
from lmkit.measure.ranges import nvtx_is_available
from lmkit.measure.tables import wrote
from lmkit.profile.kineto import profile_work, read_chrome_trace
from lmkit.profile.nsys import INSTALL, MISSING, find_nsys, profile_command, read_nsys_file
from lmkit.profile.steps import Mode, Workload, build_step, call_of
from lmkit.profile.summary import Summary, summarize
from lmkit.profile.trace import Trace
from lmkit.recipe.schema import Recipe
from lmkit.storage import write_atomic

Engine = Literal["auto", "nsys", "kineto"]
PICTURE = "profile_ranges.png"
logger = logging.getLogger("lmkit")


@dataclass(frozen=True)
class Profiled:
    """A summary, and the folder that holds it and the recording."""

    folder: str
    files: tuple[str, ...]
    summary: dict[str, Any]
    text: str

    def __str__(self) -> str:
        return f"{self.text}\n{wrote(self.folder, self.files)}"


class CommandFailed(LmkitError):
    """The profiled command failed: `lmkit profile` ends with its exit code."""


@dataclass(frozen=True)
class ProfileResult:
    """The outcome of a profile.

    Attributes:
        summary: None if the profiled command failed before anything was recorded.
        files: name -> content, for the output folder (nsys writes its own files there itself).
        exit_code: the profiled command's.
    """

    summary: Summary | None
    files: Mapping[str, bytes | str]
    exit_code: int = 0


def run_command(arguments: Sequence[str], output: Path) -> Profiled:
    """Run any command under Nsight Systems; `lmkit ...` runs with this interpreter.

    Raises:
        UsageError: nsys is not installed.
        CommandFailed: the command failed; the error has its exit code.
    """
    own = [sys.executable, "-m", "lmkit", *arguments[1:]]
    result = profile_any_command(own if arguments[0] == "lmkit" else arguments, output)
    return _stored(result, output, what=" ".join(arguments))


def run_recording(path: Path, output: Path) -> Profiled:
    """Summarize a .sqlite, .nsys-rep, .json or .json.gz file."""
    return _stored(summarize_file(path), output, what=str(path))


def run_steps(recipe: Recipe, output: Path, *, engine: Engine, mode: Mode, steps: int) -> Profiled:
    """Record training steps (or passes) of a recipe's [model] and [train], on random tokens."""
    result = profile_steps(Workload(recipe, mode, steps), output, engine=engine)
    return _stored(result, output, what=recipe.run.name)


def run_memory(recipe: Recipe, output: Path, *, mode: Mode, steps: int) -> Profiled:
    """Record the memory of training steps: peaks by phase and category, a picture, a snapshot for memory_viz."""
    from lmkit.profile.memory import run_profile

    # No warm-up: the optimizer's state appears in the first step.
    result = run_profile(Workload(recipe, mode, steps, warmup=0))
    return Profiled(str(output), _write(result.files, output), {"peaks": result.rows}, result.text)


def _stored(result: ProfileResult, output: Path, *, what: str) -> Profiled:
    environment = json.dumps(describe_environment(), indent=1) + "\n"
    names = _write({**result.files, "environment.json": environment}, output)
    if result.exit_code != 0 or result.summary is None:
        failed = CommandFailed(
            "profile.command_failed",
            f"{what}: ended with exit code {result.exit_code}",
            hint=f"{output} holds what was recorded before",
        )
        failed.exit_code = result.exit_code if result.exit_code > 0 else 128 - result.exit_code
        raise failed
    return Profiled(str(output), names, result.summary.as_dict(), result.summary.text())


def _write(files: Mapping[str, bytes | str], output: Path) -> tuple[str, ...]:
    for name, content in files.items():
        write_atomic(output / name, content)
    return tuple(files)


def choose_engine(engine: Engine) -> Literal["nsys", "kineto"]:
    """Return nsys where it works, else kineto with a warning in the log.

    Raises:
        UsageError: nsys was named and does not work.
    """
    if engine == "kineto":
        return "kineto"
    if find_nsys() is None:
        missing, remedy = MISSING, INSTALL
    elif not nvtx_is_available():
        missing = "nsys needs NVTX ranges, and this torch is a CPU build without them"
        remedy = "pip install 'nvtx==0.2.10'"
    else:
        return "nsys"
    if engine == "nsys":
        raise UsageError("nsys.missing", missing, hint=f"{remedy}, or use --engine kineto")
    logger.warning("%s: profiling with kineto (torch.profiler) instead", missing)
    return "kineto"


def profile_steps(work: Workload, folder: Path, *, engine: Engine = "auto") -> ProfileResult:
    """Profile a few training steps. nsys runs them in a process of its own and writes into `folder`."""
    if choose_engine(engine) == "nsys":
        command = [sys.executable, "-m", "lmkit.profile.steps", work.as_json()]
        return profile_any_command(command, folder, skip_steps=0, what=str(work))
    with work.numerics():
        trace, content = profile_work(
            call_of(build_step(work), work.mode),
            steps=work.steps,
            warmup=work.warmup,
            device=work.ranks.device,
            source=str(work),
        )
    result = render(trace, skip_steps=0)
    return replace(result, files={**result.files, "kineto_trace.json.gz": gzip.compress(content, mtime=0)})


def profile_any_command(
    command: Sequence[str], folder: Path, *, skip_steps: int = 1, what: str = ""
) -> ProfileResult:
    """Run a command under nsys. If the command fails, the result has its exit code and what was recorded.

    Args:
        what: the summary's source; empty: the file's name.

    Raises:
        UsageError: nsys is not installed.
    """
    run = profile_command(command, folder)
    if run.database is None:
        return ProfileResult(None, {}, run.exit_code)
    trace = read_nsys_file(run.database)
    result = render(replace(trace, source=what or trace.source), skip_steps=skip_steps)
    return replace(result, exit_code=run.exit_code)


def summarize_file(path: Path) -> ProfileResult:
    """Summarize an existing `.sqlite`, `.nsys-rep`, `.json` or `.json.gz` file.

    Raises:
        UsageError: another kind of file, or a damaged one.
    """
    is_chrome_trace = path.name.endswith((".json", ".json.gz"))
    return render(read_chrome_trace(path) if is_chrome_trace else read_nsys_file(path))


def render(trace: Trace, *, skip_steps: int = 1) -> ProfileResult:
    """Make `profile_summary.json`, `profile_report.md` and, for recorded ranges, `profile_ranges.png`."""
    summary = summarize(trace, skip_steps=skip_steps)
    files: dict[str, bytes | str] = {
        "profile_summary.json": json.dumps(summary.as_dict(), indent=2, allow_nan=False) + "\n",
        "profile_report.md": summary.markdown() + (f"\n![{PICTURE}]({PICTURE})\n" if summary.ranges else ""),
    }
    if summary.ranges:
        files[PICTURE] = _picture(summary)
    return ProfileResult(summary, files)


def _picture(summary: Summary) -> bytes:
    unit = summary.window.rpartition(" x ")[2] if summary.steps else "recording"
    fields = {
        "wall_ms": "wall",
        "dispatch_ms": "CPU dispatches",
        "wait_ms": "CPU waits",
        "gpu_ms": "GPU works",
    }
    series = {}
    for field, label in fields.items():
        of_ranges = [(getattr(entry, field), entry.instances) for entry in summary.ranges]
        if any(value is not None for value, _ in of_ranges):
            # Add up the instances of a step (the attention of every layer, say).
            series[label] = [
                None if value is None else value * count / max(1, summary.steps) for value, count in of_ranges
            ]
    return grouped_bars(
        [entry.name for entry in summary.ranges],
        series,
        title=f"Where the time of a {unit} goes ({summary.engine}; ranges lie inside one another)",
        x_label="range",
        y_label="time (ms)",
        missing="none",
        spec=".2f",
    )
