"""What no file may make its reader do: run code, write elsewhere, take a gigabyte, or hang.

Code execution and writing are watched by an audit hook (PEP 578), which sees them below any library; memory is
limited by the kernel; a hang ends the process, by a thread that needs no cooperation of the interpreter.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

SECONDS = 20
"""Ends a case. A machine that does other work too is several times slower than an idle one."""
BYTES = 1 << 30

_RUNS_CODE = (
    "pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "subprocess.Popen",
    "ctypes.dlopen", "shutil.unpack_archive",
)  # fmt: skip
_CHANGES_FILES = (
    "os.remove",
    "os.rename",
    "os.mkdir",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.chmod",
)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Forbidden(BaseException):
    """A reader did what it must not; no `except Exception` may hide it."""


class Guard:
    """Watches what happens inside `case(...)`.

    Args:
        folder: the only place where a reader may write.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = os.path.realpath(folder) + os.sep
        self._armed = False
        sys.addaudithook(self._look)

    def limit_memory(self) -> None:
        """Let the address space grow by a gigabyte from here: what was imported until now does not count."""
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    @contextmanager
    def case(self, report: IO[str]) -> Iterator[None]:
        """Arm the hook and the clock; a hang writes its traceback to `report` and ends the process."""
        faulthandler.dump_traceback_later(SECONDS, exit=True, file=report)
        self._armed = True
        try:
            yield
        finally:
            self._armed = False
            faulthandler.cancel_dump_traceback_later()

    def _look(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._armed:
            return
        if event in _RUNS_CODE or (event == "exec" and arguments[0].co_filename == "<string>"):
            self._refuse(event, arguments)
        if event == "socket.connect" and arguments[1][0] != "127.0.0.1":
            self._refuse(event, arguments)
        if event == "open" and arguments[2] & _WRITING and not self._is_inside(arguments[0]):
            self._refuse(event, arguments)
        if event in _CHANGES_FILES and not self._is_inside(arguments[0]):
            self._refuse(event, arguments)

    def _is_inside(self, path: object) -> bool:
        if isinstance(path, int):  # a descriptor: what it belongs to was looked at when it was opened
            return True
        return (os.path.realpath(os.fsdecode(path)) + os.sep).startswith(self._folder)  # type: ignore[arg-type]

    def _refuse(self, event: str, arguments: tuple[Any, ...]) -> None:
        self._armed = False  # what follows is the report
        raise Forbidden(f"{event} {str(arguments)[:200]}")


def peak_bytes() -> int:
    """Most memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
