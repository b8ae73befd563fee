"""Nsight Systems: build the command, run it around ours, export, and hand over the database."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lmkit.errors import LmkitError, UsageError
from lmkit.measure.ranges import ENVIRONMENT_VARIABLE
from lmkit.profiling.nsys_database import read_nsys_database
from lmkit.profiling.trace import Trace

MISSING = "nsys (Nsight Systems) is not on the PATH"
INSTALL = "install it (Debian: nsight-systems in non-free)"
REPORT, DATABASE, STREAM = ".nsys-rep", ".sqlite", ".qdstrm"


def find_nsys() -> Path | None:
    """The `nsys` on the PATH, or None."""
    found = shutil.which("nsys")
    return Path(found) if found else None


def require_nsys(*, otherwise: str) -> Path:
    """`find_nsys`, or a refusal whose hint ends with what the user can do `otherwise`.

    Raises:
        UsageError: nsys is not installed.
    """
    nsys = find_nsys()
    if nsys is None:
        raise UsageError(MISSING, hint=f"{INSTALL}, or {otherwise}")
    return nsys


def build_command(nsys: Path, command: Sequence[str], output: Path) -> list[str]:
    """The argument list that runs `command` under nsys and writes `<output>.nsys-rep`.

    CUDA calls and kernels, NVTX ranges and operating-system waits are traced; CPU sampling and context switches,
    which need rights that containers lack, are not.
    """
    arguments = [str(nsys), "profile", "--trace=cuda,nvtx,osrt", "--sample=none", "--cpuctxsw=none"]
    arguments += ["--force-overwrite=true", f"--output={output}"]
    return [*arguments, *command]


@dataclass(frozen=True)
class NsysRun:
    """What running under nsys left. `exit_code` is the profiled command's own."""

    exit_code: int
    report: Path | None
    database: Path | None


def profile_command(command: Sequence[str], folder: Path, *, name: str = "profile") -> NsysRun:
    """Run `command` under nsys, with our ranges switched on, and export the SQLite database beside the report.

    A command that fails gives its exit code, and no error here: what it recorded until then is kept.

    Raises:
        UsageError: nsys is not installed.
        LmkitError: the command ended well but nsys wrote no report, or the export failed.
    """
    nsys = require_nsys(otherwise="profile a recipe's steps without it: lmkit profile kineto RECIPE")
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / name
    arguments = build_command(nsys, command, output)
    # Standard output belongs to results; nsys and the command talk to standard error.
    done = subprocess.run(arguments, env={**os.environ, ENVIRONMENT_VARIABLE: "nvtx"}, stdout=2, check=False)
    report = _finished_report(nsys, output)
    if report is None:
        if done.returncode == 0:
            raise LmkitError("nsys wrote no report", hint="run it with --debug to see nsys's own messages")
        return NsysRun(done.returncode, None, None)
    return NsysRun(done.returncode, report, export_report(report))


def _finished_report(nsys: Path, output: Path) -> Path | None:
    """`<output>.nsys-rep`; made from the raw stream first where nsys did not find its importer."""
    report, stream = output.with_suffix(REPORT), output.with_suffix(STREAM)
    if not report.exists() and stream.exists():
        importer = _find_importer(nsys)
        if importer is None:
            raise LmkitError(
                f"nsys left {stream.name} and no importer was found",
                hint="import it on a machine with Nsight Systems, then summarise the .nsys-rep",
            )
        subprocess.run([str(importer), "-i", str(stream)], stdout=subprocess.DEVNULL, check=True)
    if not report.exists():
        return None
    stream.unlink(missing_ok=True)
    return report


def _find_importer(nsys: Path) -> Path | None:
    """QdstrmImporter beside nsys: Debian links nsys through folders in which nsys itself looks at the wrong end."""
    place = nsys
    while True:
        for parent in place.parents[:3]:
            found = sorted(parent.glob("host-linux-*/QdstrmImporter"))
            if found:
                return found[0]
        if not place.is_symlink():
            return None
        place = Path(os.path.normpath(place.parent / os.readlink(place)))


def export_report(report: Path) -> Path:
    """`nsys export` of a report to the SQLite file beside it.

    Raises:
        UsageError: nsys is not installed.
        LmkitError: nsys could not read the report.
    """
    database = report.with_suffix(DATABASE)
    nsys = require_nsys(otherwise=f"where it is installed: nsys export --type sqlite {report.name}")
    command = [
        str(nsys),
        "export",
        "--type=sqlite",
        "--force-overwrite=true",
        f"--output={database}",
        str(report),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not database.exists():
        reason = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise LmkitError(
            f"nsys could not export {report.name}: {reason}", hint="is nsys older than the one that wrote it?"
        )
    return database


def read_nsys_file(path: Path) -> Trace:
    """The recording in an existing `.sqlite` or `.nsys-rep` file.

    Raises:
        UsageError: another kind of file, or a report without an nsys to export it.
        LmkitError: the file cannot be read.
    """
    if path.suffix == DATABASE:
        return read_nsys_database(path)
    if path.suffix == REPORT:
        if not path.is_file():
            raise UsageError(f"{path}: no such file", hint="give a .sqlite or .nsys-rep file")
        return read_nsys_database(export_report(path))
    raise UsageError(f"{path}: neither .sqlite nor .nsys-rep", hint="give a file of Nsight Systems")
