"""Profile training steps with nsys or kineto, or summarise a file: the same files come out of all of them."""

from __future__ import annotations

import gzip
import json
import logging
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from lmkit.errors import UsageError
from lmkit.measure.plots import grouped_bars
from lmkit.measure.ranges import nvtx_is_available
from lmkit.profiling.kineto import profile_work, read_chrome_trace
from lmkit.profiling.nsys import INSTALL, MISSING, find_nsys, profile_command, read_nsys_file
from lmkit.profiling.reduction import summarize
from lmkit.profiling.steps import StepsOptions, as_the_recipe_says, build_work, describe_steps
from lmkit.profiling.summary import Summary
from lmkit.profiling.trace import Trace

Engine = Literal["auto", "nsys", "kineto"]
logger = logging.getLogger("lmkit")


@dataclass(frozen=True)
class ProfileResult:
    """The outcome of a profile.

    Attributes:
        summary: None if the profiled command failed before anything was recorded.
        files: name -> content, to be stored in the output folder (nsys has put its own files there already).
        exit_code: the profiled command's.
    """

    summary: Summary | None
    files: dict[str, bytes | str]
    exit_code: int = 0


def choose_engine(engine: Engine) -> Literal["nsys", "kineto"]:
    """nsys where it can work, else kineto, and a line in the log that says so.

    Raises:
        UsageError: nsys is asked for by name and cannot work.
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
        raise UsageError(missing, hint=hint)
    logger.warning("%s: profiling with kineto (torch.profiler) instead", missing)
    return "kineto"


def profile_steps(options: StepsOptions, folder: Path, *, engine: Engine = "auto") -> ProfileResult:
    """Profile a few training steps. nsys runs them in a process of its own and writes into `folder`."""
    if choose_engine(engine) == "nsys":
        command = [sys.executable, "-m", "lmkit.profiling.steps", options.as_json()]
        return profile_any_command(command, folder, skip_steps=0, what=describe_steps(options))
    with as_the_recipe_says(options):
        run = profile_work(
            build_work(options),
            steps=options.steps,
            warmup=options.warmup,
            device=options.device,
            source=describe_steps(options),
        )
    result = render(run.trace, skip_steps=0)
    trace = gzip.compress(run.chrome_trace, mtime=0)
    return ProfileResult(result.summary, {**result.files, "kineto_trace.json.gz": trace})


def profile_any_command(
    command: list[str], folder: Path, *, skip_steps: int = 1, what: str = ""
) -> ProfileResult:
    """Run a command under nsys. If it fails, its exit code is in the result, with what was recorded until then.

    Args:
        what: the summary's source; the file's name if empty.

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
        UsageError: none of these, or not readable as such.
    """
    is_chrome_trace = path.name.endswith((".json", ".json.gz"))
    return render(read_chrome_trace(path) if is_chrome_trace else read_nsys_file(path))


def render(trace: Trace, *, skip_steps: int = 1) -> ProfileResult:
    """`profile_summary.json`, `profile_report.md` and, where ranges were recorded, `profile_ranges.png`."""
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
        """A layer's attention happens many times in a step: they are added up."""
        values = [(getattr(entry, field), entry.instances) for entry in summary.ranges]
        return [None if value is None else value * count / max(1, summary.steps) for value, count in values]

    series = {"wall": per_unit("wall_ms")}
    if summary.launches is not None:
        series["CPU asking the GPU"] = per_unit("dispatch_ms")
        series["CPU waiting for it"] = per_unit("wait_ms")
    if summary.kernels is not None:
        series["GPU work it caused"] = per_unit("gpu_ms")
    return grouped_bars(
        [entry.name for entry in summary.ranges],
        series,
        title=f"Where the time of a {unit} goes ({summary.engine}; ranges lie inside one another)",
        x_label="range",
        y_label="time (ms)",
        missing="none",
        spec=".2f",
    )
