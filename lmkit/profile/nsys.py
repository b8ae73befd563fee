"""Nsight Systems: run a command under it, export its report to SQLite, and read the database.

Tables without records are absent from the database, so every table is looked up first.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from lmkit.errors import LmkitError, UsageError
from lmkit.measure.ranges import ENVIRONMENT_VARIABLE
from lmkit.profile.trace import Call, DeviceWork, Range, Trace

MISSING = "nsys (Nsight Systems) is not on the PATH"
INSTALL = "install it (Debian: nsight-systems in non-free)"
REPORT, DATABASE, STREAM = ".nsys-rep", ".sqlite", ".qdstrm"


def find_nsys() -> Path | None:
    """Return the `nsys` on the PATH, or None."""
    found = shutil.which("nsys")
    return Path(found) if found else None


def require_nsys(*, otherwise: str) -> Path:
    """Return the `nsys` on the PATH.

    Args:
        otherwise: the end of the hint: what the user can do instead.

    Raises:
        UsageError: nsys is not installed.
    """
    nsys = find_nsys()
    if nsys is None:
        raise UsageError("nsys.missing", MISSING, hint=f"{INSTALL}, or {otherwise}")
    return nsys


def build_command(nsys: Path, command: Sequence[str], output: Path) -> list[str]:
    """Return the argument list that runs `command` under nsys and writes `<output>.nsys-rep`.

    It traces CUDA calls and kernels, NVTX ranges and operating-system waits. CPU sampling and context switches need
    rights that containers lack, so they stay off.
    """
    arguments = [str(nsys), "profile", "--trace=cuda,nvtx,osrt", "--sample=none", "--cpuctxsw=none"]
    arguments += ["--force-overwrite=true", f"--output={output}"]
    return [*arguments, *command]


@dataclass(frozen=True)
class NsysRun:
    """The files of a run under nsys, and the exit code of the profiled command."""

    exit_code: int
    report: Path | None
    database: Path | None


def profile_command(command: Sequence[str], folder: Path, *, name: str = "profile") -> NsysRun:
    """Run `command` under nsys with lmkit's ranges on, and export its report to a SQLite database in `folder`.

    A command that fails raises nothing here: the result has its exit code and what it recorded.

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
            raise LmkitError(
                "nsys.no_report",
                "nsys wrote no report",
                hint="run it with --debug to see nsys's own messages",
            )
        return NsysRun(done.returncode, None, None)
    return NsysRun(done.returncode, report, export_report(report))


def _finished_report(nsys: Path, output: Path) -> Path | None:
    """Return `<output>.nsys-rep`, made from the raw stream where nsys did not find its importer."""
    report, stream = output.with_suffix(REPORT), output.with_suffix(STREAM)
    if not report.exists() and stream.exists():
        importer = _find_importer(nsys)
        if importer is None:
            raise LmkitError(
                "nsys.no_importer",
                f"nsys left {stream.name} and no importer was found",
                hint="import it on a machine with Nsight Systems, then summarise the .nsys-rep",
            )
        subprocess.run([str(importer), "-i", str(stream)], stdout=subprocess.DEVNULL, check=True)
    if not report.exists():
        return None
    stream.unlink(missing_ok=True)
    return report


def _find_importer(nsys: Path) -> Path | None:
    """Find nsys's QdstrmImporter. Debian links nsys through folders, and nsys looks for it at the wrong end."""
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
    """Export a report to a SQLite file of the same name.

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
            "nsys.export_failed",
            f"nsys could not export {report.name}: {reason}",
            hint="is nsys older than the one that wrote it?",
        )
    return database


def read_nsys_file(path: Path) -> Trace:
    """Read an existing `.sqlite` or `.nsys-rep` file.

    Raises:
        UsageError: another kind of file, or a report without an nsys to export it.
        LmkitError: the file cannot be read.
    """
    if path.suffix == DATABASE:
        return read_nsys_database(path)
    if path.suffix == REPORT:
        if not path.is_file():
            raise UsageError(
                "trace.missing", f"{path}: no such file", hint="give a .sqlite or .nsys-rep file"
            )
        return read_nsys_database(export_report(path))
    raise UsageError(
        "trace.wrong_kind", f"{path}: neither .sqlite nor .nsys-rep", hint="give a file of Nsight Systems"
    )


# A globalTid is (hardware, vm, process, thread); without its low 24 bits it is the globalPid of its process.
THREAD_BITS = 24
PUSH_POP, START_END = 59, 60
_KINDS = {"KERNEL": "kernel", "MEMCPY": "memcpy", "MEMSET": "memset"}


def read_nsys_database(path: Path) -> Trace:
    """Read a file that `nsys export --type sqlite` wrote.

    Raises:
        UsageError: the file is missing, is no SQLite database, or is none of nsys's.
        LmkitError: a table lacks a column that is needed.
    """
    if not path.is_file():
        raise UsageError(
            "trace.missing",
            f"{path}: no such file",
            hint="give a .sqlite or .nsys-rep file of Nsight Systems",
        )
    with closing(sqlite3.connect(path.resolve().as_uri() + "?mode=ro", uri=True)) as database:
        try:
            return _read(database, path.name)
        except sqlite3.OperationalError as error:
            raise LmkitError(
                "trace.damaged",
                f"{path}: {error}",
                hint="export it again: nsys export --type sqlite REPORT.nsys-rep",
            ) from error
        except (sqlite3.DatabaseError, TypeError) as error:
            raise UsageError(
                "trace.damaged", f"{path}: {error}", hint="give a .sqlite file that nsys exported"
            ) from error
        except UnicodeDecodeError as error:  # of SQLite's own message, which quotes the file
            raise UsageError(
                "trace.damaged", f"{path}: a damaged database", hint="give a .sqlite file that nsys exported"
            ) from error


def _read(database: sqlite3.Connection, source: str) -> Trace:
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if "StringIds" not in tables:
        raise UsageError(
            "trace.wrong_kind",
            f"{source}: not an export of Nsight Systems",
            hint="give a .sqlite file that nsys exported",
        )
    has_work = any(f"CUPTI_ACTIVITY_KIND_{kind}" in tables for kind in _KINDS)
    calls = _read_calls(database) if "CUPTI_ACTIVITY_KIND_RUNTIME" in tables else None
    notes = []
    if calls is None and not has_work:
        notes.append("no CUDA tables in this file: nothing ran on a GPU while it was traced")
    if "NVTX_EVENTS" not in tables:
        notes.append(
            "no NVTX ranges in this file: the command marked none, or nsys lost them (nsys up to 2023.4 sees those "
            "of the nvtx package 0.2.10, not of 0.2.17; with several processes it loses some runs' altogether)"
        )
    return Trace(
        engine="nsys",
        source=source,
        ranges=_read_ranges(database) if "NVTX_EVENTS" in tables else [],
        calls=calls,
        work=_read_work(database, tables) if has_work else None,
        notes=tuple(notes),
    )


def _read_ranges(database: sqlite3.Connection) -> list[Range]:
    rows = database.execute(
        "SELECT coalesce(text, value, ''), start, end, globalTid FROM NVTX_EVENTS LEFT JOIN StringIds ON id = textId "
        "WHERE eventType IN (?, ?) AND end IS NOT NULL ORDER BY start",
        (PUSH_POP, START_END),
    )
    return [
        Range(_text(name), *_span(start, end), _whole(tid) >> THREAD_BITS, tid)
        for name, start, end, tid in rows
    ]


def _read_calls(database: sqlite3.Connection) -> list[Call]:
    rows = database.execute(
        "SELECT value, start, end, globalTid, correlationId FROM CUPTI_ACTIVITY_KIND_RUNTIME "
        "JOIN StringIds ON id = nameId ORDER BY start"
    )
    return [
        Call(_text(name), *_span(start, end), _whole(tid) >> THREAD_BITS, tid, _whole(correlation))
        for name, start, end, tid, correlation in rows
    ]


def _read_work(database: sqlite3.Connection, tables: set[str]) -> list[DeviceWork]:
    found = []
    for suffix, kind in _KINDS.items():
        table = f"CUPTI_ACTIVITY_KIND_{suffix}"
        if table not in tables:
            continue
        columns = {row[1] for row in database.execute(f"PRAGMA table_info({table})")}
        graph = "graphNodeId" if "graphNodeId" in columns else "NULL"
        name, join = ("value", "JOIN StringIds ON id = shortName") if kind == "kernel" else (f"'{kind}'", "")
        query = f"SELECT {name}, start, end, globalPid, deviceId, correlationId, {graph} FROM {table} {join}"
        found += [
            DeviceWork(
                _text(name),
                kind,
                *_span(start, end),
                _whole(pid) >> THREAD_BITS,
                _whole(device),
                _whole(correlation or 0),
                node is not None,
            )
            for name, start, end, pid, device, correlation, node in database.execute(query)
        ]
    return sorted(found, key=lambda item: item.start)


def _span(start: object, end: object) -> tuple[int, int]:
    first, last = _whole(start), _whole(end)
    if last < first:
        raise TypeError(f"an event ends at {last} ns but starts at {first} ns")
    return first, last


def _whole(value: object) -> int:
    """Check a whole number: SQLite keeps any type in any column."""
    if type(value) is not int:
        raise TypeError(f"{value!r} instead of a whole number")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} instead of a name")
    return value
