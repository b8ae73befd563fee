"""Read the SQLite export of Nsight Systems. Tables that recorded nothing are absent: each is asked for first."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from lmkit.errors import LmkitError, UsageError
from lmkit.profiling.trace import Call, DeviceWork, Range, Trace

# A globalTid is (hardware, vm, process, thread); without its low 24 bits it is the globalPid of its process.
THREAD_BITS = 24
PUSH_POP, START_END = 59, 60
_KINDS = {"KERNEL": "kernel", "MEMCPY": "memcpy", "MEMSET": "memset"}


def read_nsys_database(path: Path) -> Trace:
    """The recording in an `nsys export --type sqlite` file.

    Raises:
        UsageError: the file is missing, is no SQLite database, or is none of nsys's.
        LmkitError: a table lacks a column that is needed.
    """
    if not path.is_file():
        raise UsageError(f"{path}: no such file", hint="give a .sqlite or .nsys-rep file of Nsight Systems")
    with closing(sqlite3.connect(path.resolve().as_uri() + "?mode=ro", uri=True)) as database:
        try:
            return _read(database, path.name)
        except sqlite3.OperationalError as error:
            raise LmkitError(
                f"{path}: {error}", hint="export it again: nsys export --type sqlite REPORT.nsys-rep"
            ) from error
        except (sqlite3.DatabaseError, TypeError) as error:
            raise UsageError(f"{path}: {error}", hint="give a .sqlite file that nsys exported") from error
        except UnicodeDecodeError as error:  # of SQLite's own message, which quotes the file
            raise UsageError(
                f"{path}: a damaged database", hint="give a .sqlite file that nsys exported"
            ) from error


def _read(database: sqlite3.Connection, source: str) -> Trace:
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if "StringIds" not in tables:
        raise UsageError(
            f"{source}: not an export of Nsight Systems", hint="give a .sqlite file that nsys exported"
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
        raise TypeError(f"something ends at {last} ns that began at {first} ns")
    return first, last


def _whole(value: object) -> int:
    """SQLite keeps any type in any column."""
    if type(value) is not int:
        raise TypeError(f"{value!r} stands where a whole number should")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} stands where a name should")
    return value
