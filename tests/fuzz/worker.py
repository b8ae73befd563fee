"""Read damaged files, case after case, and print one JSON line per format.

    python tests/fuzz/worker.py FOLDER FIRST_CASE CASES [FORMAT...]

A case is a number: `worker.py FOLDER 123 1 recipe` repeats one, and FOLDER/case then holds its files. A clean error
is an `LmkitError` of one line; a load must be right, which each format checks; everything else is a failure. So is
a reader that runs code, writes outside its folder, hangs, or takes a gigabyte: an audit hook (PEP 578) sees the
first two below any library, a thread ends a process that hangs, and the kernel limits memory.
"""

import faulthandler
import json
import os
import resource
import sys
import time
import traceback
from pathlib import Path
from random import Random
from typing import Any

import exchange_formats  # noqa: F401  registers its formats
import formats
import run_formats  # noqa: F401

from lmkit.errors import LONGEST, LmkitError

# Longest case. A busy machine is several times slower than an idle one.
SECONDS = 20
BYTES = 1 << 30
RUNS_CODE = (
    "pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "subprocess.Popen",
    "ctypes.dlopen", "shutil.unpack_archive",
)  # fmt: skip
CHANGES_FILES = (
    "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
)  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Forbidden(BaseException):
    """A reader did what it must not; no `except Exception` may hide it."""


class Guard:
    """An audit hook that is armed while a case is read; `folder` is the only place where a reader may write."""

    def __init__(self, folder: Path) -> None:
        self.folder = os.path.realpath(folder) + os.sep
        self.armed = False
        sys.addaudithook(self._look)

    def _look(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.armed:
            return
        if (
            event in RUNS_CODE
            or (event == "exec" and arguments[0].co_filename == "<string>")
            or (event == "socket.connect" and arguments[1][0] != "127.0.0.1")
            or (event == "open" and arguments[2] & WRITING and not self._is_inside(arguments[0]))
            or (event in CHANGES_FILES and not self._is_inside(arguments[0]))
        ):
            self.armed = False  # what follows is the report
            raise Forbidden(f"{event} {str(arguments)[:200]}")

    def _is_inside(self, path: Any) -> bool:
        # A descriptor's file was looked at when it was opened.
        return isinstance(path, int) or (os.path.realpath(os.fsdecode(path)) + os.sep).startswith(self.folder)


def make(name: str, folder: Path) -> formats.Format:
    """Make a format and read its good files: what is imported at first use belongs to no case."""
    place = folder / f"good-{name.replace('/', ' ')}"
    place.mkdir(parents=True)
    form = formats.FORMATS[name](place)
    for good in form.goods[:3]:
        formats.write(good, folder / "case")
        form.read(folder / "case", good, Random(0))
    return form


def run_case(name: str, form: formats.Format, number: int, folder: Path, guard: Guard) -> tuple[str, str]:
    """Damage, write, read: return ("error" or "load" or "failure", details)."""
    random = Random(f"{name} {number}")
    files, good = form.damaged(random)
    formats.write(files, folder / "case")
    with open(folder / "progress", "w") as report:
        report.write(f"{name} {number}\n")
        report.flush()
        faulthandler.dump_traceback_later(SECONDS, exit=True, file=report)
        guard.armed = True
        try:
            form.read(folder / "case", good, random)
        except LmkitError as error:
            if len(error.message) > 2 * LONGEST or "\n" in error.message + error.hint:
                return "failure", f"not one line: {len(error.message)} characters, {error.message[:300]!r}"
            return "error", error.message
        except (Exception, Forbidden):  # noqa: BLE001 (whatever else escapes is what we look for)
            return "failure", traceback.format_exc()
        finally:
            guard.armed = False
            faulthandler.cancel_dump_traceback_later()
    return "load", ""


def peak_mb() -> float:
    """Return the most memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def main(folder: Path, first: int, cases: int, names: list[str]) -> None:
    guard = Guard(folder / "case")
    forms = {name: make(name, folder) for name in names or formats.FORMATS}
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    baseline = peak_mb()  # mostly libraries
    for name, form in forms.items():
        outcomes: dict[str, int] = {"error": 0, "load": 0, "failure": 0}
        failures, slowest = [], 0.0
        for number in range(first, first + cases):
            started = time.perf_counter()
            outcome, details = run_case(name, form, number, folder, guard)
            slowest = max(slowest, time.perf_counter() - started)
            outcomes[outcome] += 1
            if outcome == "failure" and len(failures) < 20:
                failures.append({"case": number, "details": details[-2500:]})
        counts = dict(zip(("clean_errors", "loads", "failures"), outcomes.values(), strict=True))
        limits = {"slowest_s": round(slowest, 3), "grown_mb": round(peak_mb() - baseline)}
        summary = {"format": name, "first_case": first, "cases": cases, **counts, **limits}
        print(json.dumps({**summary, "examples": failures}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
