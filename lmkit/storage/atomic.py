"""Write to a partial name, fsync, rename: a final name never holds half a file."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lmkit.errors import LmkitError, UsageError
from lmkit.storage.inputs import open_input
from lmkit.storage.locks import hold_file

PARTIAL_SUFFIX = ".lmkit-partial"  # only lmkit gives names with this ending
_SCRATCH_SUFFIX = ".scratch" + PARTIAL_SUFFIX
DAMAGED_SUFFIX = ".damaged"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_FSYNC = (errno.EINVAL, errno.EBADF, errno.ENOTSUP)  # of folders, on some network shares
_BLOCK = 1 << 20


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield `<path>.lmkit-partial` to write to; on success fsync it and rename it to `path`, else remove it.

    The partial file lies in the same folder, so that the rename never crosses a file system. Missing parent
    folders are created. A kill leaves the partial file behind: the next writer of `path` reuses it, and
    `remove_partials` deletes it.

    Raises:
        LmkitError: another process is writing the same file ("storage.file_busy").
    """
    final = Path(path)
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.with_name(final.name + PARTIAL_SUFFIX)
    descriptor = hold_file(partial)
    if descriptor is None:
        raise LmkitError(
            "storage.file_busy",
            f"{final}: is being written by another process",
            hint="wait for it to end, or choose another name",
        )
    try:
        os.ftruncate(descriptor, 0)  # drop what a killed process left
        with naming(final):
            yield partial
            fsync_file(partial)
        os.replace(partial, final)
        fsync_folder(final.parent)
    except BaseException:
        with suppress(OSError):  # the disk may be read-only by now: report the first error, not this one
            partial.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def write_atomic(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write `content` (text as UTF-8, newlines untouched) so that `path` holds all of it or is unchanged."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    with atomic_path(path) as partial:
        partial.write_bytes(data)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield the folder `<path>.lmkit-partial/` to write to; on success fsync and rename it to `path`, else remove it.

    Missing parent folders are created. A kill leaves the partial folder behind: the next writer of `path` empties it.

    Raises:
        UsageError: `path` exists, and is not an empty folder, or one that no rename can replace ("output.exists").
        LmkitError: another process is writing the same folder ("storage.file_busy").
    """
    # The real path of a link that leads to itself is that link.
    if os.path.lexists(os.path.realpath(path)) and not (path.is_dir() and not any(path.iterdir())):
        hint = "choose another name, or move it away"
        raise UsageError("output.exists", f"{path}: exists already", hint=hint)
    given, path = path, Path(os.path.realpath(path))  # a rename would not replace what a link names
    if (is_mount := os.path.ismount(path)) or path == Path.cwd():
        what = "is where a disk is mounted" if is_mount else "is the current folder"
        hint = f"name a folder in it, such as {given / 'model'}"
        raise UsageError("output.exists", f"{given}: {what}, which cannot be replaced", hint=hint)
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    lock = partial / ".lock"
    partial.mkdir(parents=True, exist_ok=True)
    descriptor = hold_file(lock)
    if descriptor is None:
        hint = "wait for it to end, or choose another name"
        raise LmkitError("storage.file_busy", f"{path}: is being written by another process", hint=hint)
    try:
        for left in partial.iterdir():
            if left != lock:
                shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        with naming(path):
            yield partial
        for folder, _, files in os.walk(partial):
            for name in files:
                fsync_file(Path(folder, name))
            fsync_folder(folder)
        lock.unlink()
        os.replace(partial, path)
        fsync_folder(path.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(descriptor)


@contextmanager
def scratch_folder(parent: Path | None) -> Iterator[Path]:
    """Yield a temporary folder in `parent`, which is created; None: in the system's, which may be small.

    A kill leaves it behind: the next scratch folder in the same parent deletes it.
    """
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
        for left in parent.glob(f"*{_SCRATCH_SUFFIX}"):
            if (descriptor := hold_file(left / ".lock")) is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(descriptor)
    made = Path(tempfile.mkdtemp(dir=parent))
    descriptor = hold_file(made / ".lock")
    assert descriptor is not None  # nobody else knows the name
    try:
        made = made.rename(made.with_name(made.name + _SCRATCH_SUFFIX))  # locked when others see it
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        os.close(descriptor)


@contextmanager
def naming(what: object) -> Iterator[None]:
    """Name `what` in an error about a full disk that the block raises: the kernel names no file."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in _NO_ROOM:
            error.filename = str(what)
        raise


def remove_partials(folder: str | os.PathLike[str]) -> list[Path]:
    """Delete the partial files that killed processes left directly in `folder`; return their paths.

    A partial file that a live process is writing stays.
    """
    removed = []
    for partial in sorted(Path(folder).glob(f"*{PARTIAL_SUFFIX}")):
        if not partial.is_file():
            continue
        descriptor = hold_file(partial)
        if descriptor is not None:
            partial.unlink(missing_ok=True)
            os.close(descriptor)
            removed.append(partial)
    return removed


def keep_damaged(path: Path) -> Path:
    """Rename a file or folder to `<path>.damaged` and return the new path; if that exists, add more such endings."""
    kept = path
    while os.path.lexists(kept):  # a link to nothing, too
        kept = kept.with_name(kept.name + DAMAGED_SUFFIX)
    return path.rename(kept)


def sha256_file(path: str | os.PathLike[str]) -> str:
    """Return the hexadecimal SHA-256 of a file, in constant memory."""
    digest = hashlib.sha256()
    with open_input(path) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def noted_digest(path: Path, noted: Sequence[Any]) -> list[Any]:
    """Return size, two times and SHA-256 of a file. It is read only if one of the first three is not as noted.

    A change that restores size and modification time still changes the time of the inode.
    """
    facts = path.stat()
    state = [facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns]
    if noted and isinstance(noted[-1], str) and list(noted[:-1]) == state:
        return list(noted)
    return [*state, sha256_file(path)]


def fsync_file(path: str | os.PathLike[str]) -> None:
    """Force the content of a file to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_folder(folder: str | os.PathLike[str]) -> None:
    """Force the entries of a folder, such as a rename, to the disk, where the file system can."""
    try:
        fsync_file(folder)
    except OSError as error:
        if error.errno not in _NO_FSYNC:
            raise
