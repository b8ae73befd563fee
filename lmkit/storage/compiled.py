"""Compile a shared library once per machine, keep it in the user's cache folder, and load it."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from lmkit.errors import LmkitError, reason
from lmkit.storage.atomic import write_atomic
from lmkit.storage.inputs import read_input

_log = logging.getLogger("lmkit")


def load_compiled(name: str, build: Callable[[Path], None], *, what: str) -> ctypes.CDLL:
    """Load a shared library from the cache, or build it first. Of several processes one builds and the others wait.

    Args:
        name: contains a hash of everything that determines the library.
        build: writes the library to the path that it is given. Its errors pass through.
        what: for the warning where there is no folder to keep it in.

    Raises:
        OSError: the library cannot be loaded.
    """
    with ExitStack() as held:
        try:
            cache = os.environ.get("XDG_CACHE_HOME")
            kept = (Path(cache) if cache else Path.home() / ".cache") / "lmkit" / f"{name}.so"
            if not kept.exists():
                kept.parent.mkdir(parents=True, exist_ok=True)
                held.enter_context(_one_at_a_time(kept.with_suffix(".lock")))
            is_kept = kept.exists()
        except (OSError, RuntimeError) as error:  # RuntimeError: Path.home() found no home directory
            _warn(what, error)
            return _load(_built(name, build))
        if not is_kept:
            library = _built(name, build)
            try:
                write_atomic(kept, library)
            except (OSError, LmkitError) as error:
                _warn(what, error)
                return _load(library)
    try:
        return ctypes.CDLL(str(kept))
    except OSError:  # nothing runs from a disk that is mounted with noexec
        return _load(read_input(kept))


def _warn(what: str, error: Exception) -> None:
    why = reason(error) if isinstance(error, OSError) else str(error)
    where = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
    _log.warning("%s%s: %s is compiled again for each process", where, why, what)


def _built(name: str, build: Callable[[Path], None]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        build(path)
        return read_input(path)


def _load(library: bytes) -> ctypes.CDLL:
    """Load a library from the folder of temporary files."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "lmkit.so")
        path.write_bytes(library)
        return ctypes.CDLL(str(path))


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Hold a lock inside of the block, where the file system has locks; without, each process builds."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        path.unlink(missing_ok=True)  # waiting processes hold the file open; later ones find the library
        os.close(descriptor)
