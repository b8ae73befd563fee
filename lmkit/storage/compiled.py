"""Compile a shared library once per machine, keep it in the user's cache folder, and load it."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lmkit.errors import reason

_log = logging.getLogger("lmkit")


def load_compiled(name: str, build: Callable[[Path], None], *, what: str) -> ctypes.CDLL:
    """Load a shared library from the cache, or build it first. Of several processes one builds and the others wait.

    Args:
        name: the file name; contains a hash of everything that determines the library.
        build: writes the library to the path that it is given. Its errors pass through.
        what: for the warning where there is no folder to keep it in.
    """
    try:
        cache = os.environ.get("XDG_CACHE_HOME")
        kept = (Path(cache) if cache else Path.home() / ".cache") / "lmkit" / name
        if kept.exists():
            return ctypes.CDLL(str(kept))
        kept.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(dir=kept.parent)
    except (OSError, RuntimeError) as error:  # RuntimeError: Path.home() found no home directory
        why = f"{kept.parent}: {reason(error)}" if isinstance(error, OSError) else str(error)
        _log.warning("%s: %s is compiled again for each process", why, what)
        with tempfile.TemporaryDirectory() as private:
            build(Path(private) / name)
            return ctypes.CDLL(str(Path(private) / name))
    with folder, _one_at_a_time(kept.with_suffix(".lock")):
        if not kept.exists():
            build(Path(folder.name) / name)
            (Path(folder.name) / name).replace(kept)
    return ctypes.CDLL(str(kept))


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
