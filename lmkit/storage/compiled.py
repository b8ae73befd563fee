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
from lmkit.storage.atomic import sha256_file, write_atomic
from lmkit.storage.inputs import read_input

_log = logging.getLogger("lmkit")


def load_compiled(name: str, build: Callable[[Path], None], *, what: str) -> ctypes.CDLL:
    """Load a shared library from the cache, or build it first. Of several processes one builds and the others wait.

    The name of a kept library has the hash of its content. Other content is removed and built again: a library that
    is cut would end the process.

    Args:
        name: contains a hash of everything that determines the library.
        build: writes the library to the path that it is given. Its errors pass through.
        what: for the warning where there is no folder to keep it in.
    """
    with ExitStack() as held:
        folder = kept = None
        try:
            cache = os.environ.get("XDG_CACHE_HOME")
            place = (Path(cache) if cache else Path.home() / ".cache") / "lmkit"
            kept = _find(place, name)
            if kept is None:
                place.mkdir(parents=True, exist_ok=True)
                held.enter_context(_one_at_a_time(place / f"{name}.lock"))
                kept = _find(place, name)
            folder = place
        except (OSError, RuntimeError) as error:  # RuntimeError: Path.home() found no home directory
            _warn(what, error)
        made: Path | None = None
        if kept is None:
            made = Path(held.enter_context(tempfile.TemporaryDirectory()), "lmkit.so")
            build(made)
            library = read_input(made)
            try:
                if folder is not None:
                    kept = folder / f"{name}-{sha256_file(made)[:16]}.so"
                    write_atomic(kept, library)
            except (OSError, LmkitError) as error:
                _warn(what, error)
        if kept is not None:
            with suppress(OSError):  # nothing runs from a disk that is mounted with noexec
                return ctypes.CDLL(str(kept))
        if made is None:
            assert kept is not None
            made = Path(held.enter_context(tempfile.TemporaryDirectory()), "lmkit.so")
            made.write_bytes(read_input(kept))
        return ctypes.CDLL(str(made))


def _warn(what: str, error: Exception) -> None:
    where = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
    _log.warning("%s%s: %s is compiled again for each process", where, reason(error), what)


def _find(folder: Path, name: str) -> Path | None:
    """Return the kept library; remove others of this name."""
    for path in folder.glob(f"{name}-*.so"):
        with suppress(FileNotFoundError):  # another process removes it
            if path.stem == f"{name}-{sha256_file(path)[:16]}":
                return path
            path.unlink()
    return None


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
