"""Nsight Systems: run a command under it, export its report to SQLite, and read the database.

Tables without records are absent from the database, so every table is looked up first.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from lmkit.errors import LmkitError, UsageError
from lmkit.measure.ranges import ENVIRONMENT_VARIABLE
from lmkit.measure.trace import Call, DeviceWork, Range, Trace

MISSING = "nsys (Nsight Systems) is not on the PATH"
INSTALL = "install it (Debian: nsight-systems in non-free)"
REPORT, DATABASE, STREAM = ".nsys-rep", ".sqlite", ".qdstrm"
GIVE_EXPORT = "give a .sqlite file that nsys exported"
GIVE_FILE = "give a .sqlite or .nsys-rep file of Nsight Systems"


def require_nsys(*, otherwise: str) -> str:
    """Return the `nsys` on the PATH, or raise an error; `otherwise` is the end of its hint."""
    nsys = shutil.which("nsys")
    if nsys is None:
        raise UsageError("nsys.missing", MISSING, hint=f"{INSTALL}, or {otherwise}")
    return nsys


def profile_command(command: Sequence[str], folder: Path) -> tuple[int, Path | None]:
    """Run `command` under nsys with lmkit's ranges on; return its exit code, and the SQLite database of its report.

    CPU sampling and context switches need rights that containers lack, so they stay off.
    """
    nsys = require_nsys(otherwise="profile a recipe's steps without it: lmkit profile kineto RECIPE")
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / "profile"
    options = ["--trace=cuda,nvtx,osrt", "--sample=none", "--cpuctxsw=none", "--force-overwrite=true"]
    arguments = [nsys, "profile", *options, f"--output={output}", *command]
    # Standard output belongs to results; nsys and the command talk to standard error.
    done = subprocess.run(arguments, env={**os.environ, ENVIRONMENT_VARIABLE: "nvtx"}, stdout=2, check=False)
    report = output.with_suffix(REPORT)
    if report.exists():
        return done.returncode, export_report(report, folder)
    if done.returncode == 0:
        hint = f"nsys's own messages say why; a {STREAM} file becomes a report by its QdstrmImporter"
        raise LmkitError("nsys.no_report", f"{folder}: nsys wrote no report", hint=hint)
    return done.returncode, None


def export_report(report: Path, folder: Path) -> Path:
    """Export a report to a SQLite file of the same name in `folder`."""
    database = folder / report.with_suffix(DATABASE).name
    nsys = require_nsys(otherwise=f"where it is installed: nsys export --type sqlite {report.name}")
    options = ["--type=sqlite", "--force-overwrite=true", f"--output={database}"]
    command = [nsys, "export", *options, str(report)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not database.exists():
        said = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        message = f"nsys could not export {report.name}: {said}"
        raise LmkitError("nsys.export_failed", message, hint="is nsys older than the one that wrote it?")
    return database


def read_nsys_file(path: Path) -> Trace:
    """Read an existing `.sqlite` or `.nsys-rep` file."""
    if path.suffix not in (DATABASE, REPORT):
        raise UsageError("trace.wrong_kind", f"{path}: neither .sqlite nor .nsys-rep", hint=GIVE_FILE)
    if not path.is_file():
        raise UsageError("trace.missing", f"{path}: no such file", hint=GIVE_FILE)
    if path.suffix == DATABASE:
        return read_nsys_database(path)
    with tempfile.TemporaryDirectory() as folder:  # a database beside the report stays as it is
        return read_nsys_database(export_report(path, Path(folder)))


def read_nsys_database(path: Path) -> Trace:
    """Read a file that `nsys export --type sqlite` wrote; see `read_nsys_file`."""
    with closing(sqlite3.connect(path.resolve().as_uri() + "?mode=ro", uri=True)) as database:
        try:
            return _read(database, path.name)
        except sqlite3.OperationalError as error:
            again = "export it again: nsys export --type sqlite REPORT.nsys-rep"
            raise LmkitError("trace.damaged", f"{path}: {error}", hint=again) from error
        except sqlite3.DatabaseError as error:
            raise UsageError("trace.damaged", f"{path}: {error}", hint=GIVE_EXPORT) from error


# A globalTid is (hardware, vm, process, thread); without its low 24 bits it is the globalPid of its process.
# Event types of NVTX: 59 is a push/pop range, 60 a start/end range.
RANGES = """
SELECT coalesce(text, value, ''), start, end, globalTid >> 24, globalTid
FROM NVTX_EVENTS LEFT JOIN StringIds ON id = textId
WHERE eventType IN (59, 60) AND end IS NOT NULL ORDER BY start"""
CALLS = """
SELECT value, start, end, globalTid >> 24, globalTid, correlationId
FROM CUPTI_ACTIVITY_KIND_RUNTIME JOIN StringIds ON id = nameId ORDER BY start"""
WORK = """
SELECT {name}, start, end, globalPid >> 24, deviceId, coalesce(correlationId, 0), {from_graph}
FROM {table} {join}"""


def _read(database: sqlite3.Connection, source: str) -> Trace:
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if "StringIds" not in tables:
        not_an_export = f"{source}: not an export of Nsight Systems"
        raise UsageError("trace.wrong_kind", not_an_export, hint=GIVE_EXPORT)
    ranges, calls, work, notes = [], None, None, []
    if "NVTX_EVENTS" in tables:
        ranges = [Range(*row) for row in database.execute(RANGES)]
    else:
        notes.append(
            "no NVTX ranges in this file: the command marked none, or nsys lost them (nsys up to 2023.4 sees those "
            "of the nvtx package 0.2.10, not of 0.2.17; with several processes it loses some runs' altogether)"
        )
    if "CUPTI_ACTIVITY_KIND_RUNTIME" in tables:
        calls = [Call(*row) for row in database.execute(CALLS)]
    for kind in ("kernel", "memcpy", "memset"):
        table = f"CUPTI_ACTIVITY_KIND_{kind.upper()}"
        if table in tables:
            columns = {row[1] for row in database.execute(f"PRAGMA table_info({table})")}
            query = WORK.format(
                name="value" if kind == "kernel" else f"'{kind}'",
                from_graph="graphNodeId IS NOT NULL" if "graphNodeId" in columns else "0",
                table=table,
                join="JOIN StringIds ON id = shortName" if kind == "kernel" else "",
            )
            work = (work or []) + [DeviceWork(kind, *row) for row in database.execute(query)]
    if calls is None and work is None:
        notes.insert(0, "no CUDA tables in this file: nothing ran on a GPU while it was traced")
    if work is not None:
        work.sort(key=lambda item: item.start)
    return Trace("nsys", source, ranges, calls, work, notes=tuple(notes))
