"""`lmkit profile`: record training steps or a command, or summarise a recording, and store the results."""

from __future__ import annotations

import gzip
import json
import logging
import sys
from collections.abc import Sequence
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
from lmkit.profile.steps import Mode, Workload, as_the_recipe_says, build_step, call_of
from lmkit.profile.summary import Summary, summarize
from lmkit.profile.trace import Trace
from lmkit.recipe.schema import Recipe
from lmkit.storage import write_atomic

Engine = Literal["auto", "nsys", "kineto"]
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


def run_command(arguments: Sequence[str], output: Path) -> Profiled:
    """Run any command under Nsight Systems; `lmkit ...` runs with this interpreter.

    Raises:
        UsageError: nsys is not installed.
        CommandFailed: the command failed; the error has its exit code.
    """
    own = [sys.executable, "-m", "lmkit", *arguments[1:]]
    result = profile_any_command(own if arguments[0] == "lmkit" else list(arguments), output)
    return _stored(result, output, what=" ".join(arguments))


def run_recording(path: Path, output: Path) -> Profiled:
    """Summarise a .sqlite, .nsys-rep, .json or .json.gz file."""
    return _stored(summarize_file(path), output, what=str(path))


def run_steps(recipe: Recipe, output: Path, *, engine: Engine, mode: Mode, steps: int) -> Profiled:
    """Record training steps (or passes) of a recipe's [model] and [train], on random tokens."""
    work = Workload(recipe, mode, steps)
    return _stored(profile_steps(work, output, engine=engine), output, what=recipe.run.name)


def run_memory(recipe: Recipe, output: Path, *, mode: Mode, steps: int) -> Profiled:
    """Record the memory of training steps: peaks by phase and category, a picture, a snapshot for memory_viz."""
    from lmkit.profile.memory import run_profile

    # No warm-up: the optimizer's state appears in the first step.
    result = run_profile(Workload(recipe, mode, steps, warmup=0))
    files = {**result.files, "environment.json": json.dumps(result.environment, indent=1) + "\n"}
    for name, content in files.items():
        write_atomic(output / name, content)
    return Profiled(str(output), tuple(files), {"peaks": result.rows}, result.table())


def _stored(result: ProfileResult, output: Path, *, what: str) -> Profiled:
    files = {**result.files, "environment.json": json.dumps(describe_environment(), indent=1) + "\n"}
    for name, content in files.items():
        write_atomic(output / name, content)
    if result.exit_code != 0 or result.summary is None:
        failed = CommandFailed(
            "profile.command_failed",
            f"{what}: ended with exit code {result.exit_code}",
            hint=f"{output} holds what was recorded before",
        )
        failed.exit_code = result.exit_code if result.exit_code > 0 else 128 - result.exit_code
        raise failed
    return Profiled(str(output), tuple(files), result.summary.as_dict(), result.summary.text())


@dataclass(frozen=True)
class ProfileResult:
    """The outcome of a profile.

    Attributes:
        summary: None if the profiled command failed before anything was recorded.
        files: name -> content, for the output folder (nsys writes its own files there itself).
        exit_code: the profiled command's.
    """

    summary: Summary | None
    files: dict[str, bytes | str]
    exit_code: int = 0


def choose_engine(engine: Engine) -> Literal["nsys", "kineto"]:
    """Return nsys where it works, else kineto with a warning in the log.

    Raises:
        UsageError: nsys was named and does not work.
    """
    if engine == "kineto":
        return "kineto"
    if find_nsys() is None:
        missing, hint = MISSING, f"{INSTALL}, or use --engine kineto"
    elif not nvtx_is_available():
        missing = "nsys needs NVTX ranges, and this torch is a CPU build without them"
        hint = "pip install 'nvtx==0.2.10', or use --engine kineto"
    else:
        return "nsys"
    if engine == "nsys":
        raise UsageError("nsys.missing", missing, hint=hint)
    logger.warning("%s: profiling with kineto (torch.profiler) instead", missing)
    return "kineto"


def profile_steps(work: Workload, folder: Path, *, engine: Engine = "auto") -> ProfileResult:
    """Profile a few training steps. nsys runs them in a process of its own and writes into `folder`."""
    if choose_engine(engine) == "nsys":
        command = [sys.executable, "-m", "lmkit.profile.steps", work.as_json()]
        return profile_any_command(command, folder, skip_steps=0, what=str(work))
    with as_the_recipe_says(work):
        run = profile_work(
            call_of(build_step(work), work.mode),
            steps=work.steps,
            warmup=work.warmup,
            device=work.ranks.device,
            source=str(work),
        )
    result = render(run.trace, skip_steps=0)
    trace = gzip.compress(run.chrome_trace, mtime=0)
    return ProfileResult(result.summary, {**result.files, "kineto_trace.json.gz": trace})


def profile_any_command(
    command: list[str], folder: Path, *, skip_steps: int = 1, what: str = ""
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
    return ProfileResult(result.summary, result.files, run.exit_code)


def summarize_file(path: Path) -> ProfileResult:
    """Summarise an existing `.sqlite`, `.nsys-rep`, `.json` or `.json.gz` file.

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
        "profile_report.md": summary.markdown(),
    }
    if summary.ranges:
        files["profile_ranges.png"] = _picture(summary)
        files["profile_report.md"] = summary.markdown() + "\n![profile_ranges.png](profile_ranges.png)\n"
    return ProfileResult(summary, files)


def _picture(summary: Summary) -> bytes:
    unit = summary.window.rpartition(" x ")[2] if summary.steps else "recording"

    def per_unit(field: str) -> list[float | None]:
        """Add up the instances of a step (a layer's attention, say)."""
        values = [(getattr(entry, field), entry.instances) for entry in summary.ranges]
        return [None if value is None else value * count / max(1, summary.steps) for value, count in values]

    series = {"wall": per_unit("wall_ms")}
    if summary.launches is not None:
        series["CPU dispatches"] = per_unit("dispatch_ms")
        series["CPU waits"] = per_unit("wait_ms")
    if summary.kernels is not None:
        series["GPU works"] = per_unit("gpu_ms")
    return grouped_bars(
        [entry.name for entry in summary.ranges],
        series,
        title=f"Where the time of a {unit} goes ({summary.engine}; ranges lie inside one another)",
        x_label="range",
        y_label="time (ms)",
        missing="none",
        spec=".2f",
    )
