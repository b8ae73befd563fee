"""Write to a partial name, fsync, rename: a final name never holds half a file."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lmkit.errors import LmkitError
from lmkit.storage.locks import hold_file

PARTIAL_SUFFIX = ".partial"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield `<path>.partial` to write to; on success it is fsynced and renamed to `path`, else removed.

    The partial file lies in the same folder, so that the rename never crosses a file system. Missing parent
    folders are created. A kill leaves the partial file behind; the next writer of `path` takes it over, and
    `remove_partials` deletes it.

    Raises:
        LmkitError: another process is writing the same file.
    """
    final = Path(path)
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.with_name(final.name + PARTIAL_SUFFIX)
    descriptor = hold_file(partial)
    if descriptor is None:
        raise LmkitError(
            f"{final}: is being written by another process", hint="wait for it to end, or choose another name"
        )
    try:
        os.ftruncate(descriptor, 0)  # what a killed process left
        yield partial
        fsync_file(partial)
        os.replace(partial, final)
        fsync_folder(final.parent)
    except BaseException as error:
        with suppress(OSError):  # of a disk that went read-only, say: what went wrong first is to be told
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None and error.errno in _NO_ROOM:
            error.filename = str(final)  # the kernel does not say which file did not fit
        raise
    finally:
        os.close(descriptor)


def write_atomic(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write `content` (text as UTF-8, newlines untouched) so that `path` holds all of it or is unchanged."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    with atomic_path(path) as partial:
        partial.write_bytes(data)


def remove_partials(folder: str | os.PathLike[str]) -> list[Path]:
    """Delete the partial files that killed processes left directly in `folder`; return what was deleted."""
    found = sorted(p for p in Path(folder).glob(f"*{PARTIAL_SUFFIX}") if p.is_file())
    return [partial for partial in found if _remove_left(partial)]


def _remove_left(partial: Path) -> bool:
    """Delete a partial file unless a process that lives is writing to it; return whether it was deleted."""
    descriptor = hold_file(partial)
    if descriptor is None:
        return False
    partial.unlink(missing_ok=True)
    os.close(descriptor)
    return True


def fsync_file(path: str | os.PathLike[str]) -> None:
    """Force a file's content to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_folder(folder: str | os.PathLike[str]) -> None:
    """Force a folder's entries (a rename, say) to the disk."""
    fsync_file(folder)
