"""Write to a partial name, fsync, rename: a final name never holds half a file."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import filterfalse
from pathlib import Path
from types import TracebackType
from typing import Any

from lmkit.errors import PARTIAL_SUFFIX as PARTIAL_SUFFIX
from lmkit.errors import LmkitError, UsageError, reason
from lmkit.storage.inputs import open_input

_SCRATCH_SUFFIX = ".scratch" + PARTIAL_SUFFIX
DAMAGED_SUFFIX = ".damaged"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_FSYNC = (errno.EINVAL, errno.EBADF, errno.ENOTSUP)  # of folders, on some network shares
_BLOCK = 1 << 20


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield `<path>.lmkit-partial` to write to; on success fsync it and rename it to `path`, else remove it.

    Missing parent folders are created. The next writer of `path` reuses what a kill leaves behind, and
    `remove_partials` deletes it. LmkitError: another process is writing the same file ("storage.file_busy").
    """
    final = Path(path)
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.with_name(final.name + PARTIAL_SUFFIX)
    with _writing(final, partial) as descriptor:
        try:
            os.ftruncate(descriptor, 0)  # drop what a killed process left
            yield partial
            fsync(partial)
            os.replace(partial, final)
            fsync(final.parent)
        except BaseException:
            with suppress(OSError):  # the disk may be read-only by now: report the first error, not this one
                partial.unlink(missing_ok=True)
            raise


@contextmanager
def _writing(final: Path, partial: Path) -> Iterator[int]:
    """Hold the partial file of `final`; yield its descriptor."""
    descriptor = hold_file(partial)
    if descriptor is None:
        hint = "wait for it to end, or choose another name"
        raise LmkitError("storage.file_busy", f"{final}: is being written by another process", hint=hint)
    try:
        with naming(final):
            yield descriptor
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

    Missing parent folders are created. The next writer of `path` empties what a kill leaves behind.

    Raises:
        UsageError: `path` is neither missing nor an empty folder, or no rename can replace it ("output.exists").
        LmkitError: another process is writing the same folder ("storage.file_busy").
    """
    # The real path of a link that leads to itself is that link.
    if os.path.lexists(os.path.realpath(path)) and not (path.is_dir() and not any(path.iterdir())):
        hint = "choose another name, or move it away"
        raise UsageError("output.exists", f"{path}: exists already", hint=hint)
    given, path = path, Path(os.path.realpath(path))  # a rename would not replace what a link names
    if os.path.ismount(path) or path == Path.cwd():
        hint = f"name a folder in it, such as {given / 'model'}"
        raise UsageError("output.exists", f"{given}: is in use, and cannot be replaced", hint=hint)
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    lock = partial / ".lock"
    partial.mkdir(parents=True, exist_ok=True)
    with _writing(path, lock):
        try:
            for left in partial.iterdir():
                if left != lock:
                    shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
            yield partial
            for folder, _, files in os.walk(partial):
                for name in files:
                    fsync(Path(folder, name))
                fsync(folder)
            lock.unlink()
            os.replace(partial, path)
            fsync(path.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


@contextmanager
def scratch_folder(parent: Path | None) -> Iterator[Path]:
    """Yield a temporary folder in `parent`, which is created; None: in the system's, which may be small. The next
    scratch folder in the same parent deletes what a kill leaves behind."""
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
    """Delete the partial files in `folder` that no live process is writing; return their paths."""
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


def noted_digest(path: Path, noted: Any) -> list[Any]:
    """Return size, two times and SHA-256 of a file, which is read only if one of the first three is not as `noted`
    (returned before, kept in a file that may be damaged). Who restores the size and the modification time still
    changes the time of the inode."""
    facts = path.stat()
    state = [facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns]
    if isinstance(noted, list) and noted[:-1] == state and isinstance(noted[-1], str):
        return noted
    return [*state, sha256_file(path)]


def fsync(path: str | os.PathLike[str]) -> None:
    """Force the content of a file to the disk, or the entries of a folder, where the file system can."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _NO_FSYNC or not os.path.isdir(path):
            raise


_LONGEST_NAME = 200


def hold_file(path: Path) -> int | None:
    """Open and lock a file, creating it if it is missing.

    Return the descriptor (closing it releases the lock), or None if another process holds the lock. LmkitError: the
    file system has no locks ("storage.no_locks").
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError as error:
            os.close(descriptor)
            hint = "work on a disk that has locks; shares have mount options for them"
            message = f"{path}: cannot be locked (flock): {reason(error)}"
            raise LmkitError("storage.no_locks", message, hint=hint) from error
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        # The last holder renamed or deleted the file between our open and our lock: open the path again.
        os.close(descriptor)


class FolderLock:
    """Hold `folder/.lock` inside the `with` block, with the name of this process in it.

    Missing folders are created; if the block fails and left them empty, they are removed again. A held lock can be an
    argument of a new process of multiprocessing, which then holds it, too. LmkitError: another process holds the lock
    ("storage.folder_busy").
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder) / ".lock"
        self._descriptor: int | None = None
        self._made: list[Path] = []

    def __enter__(self) -> FolderLock:
        folder = self.path.parent
        self._made = list(filterfalse(Path.exists, (folder, *folder.parents)))
        folder.mkdir(parents=True, exist_ok=True)
        self._descriptor = hold_file(self.path)
        if self._descriptor is None:
            with open_input(self.path) as file:
                holder = file.read(_LONGEST_NAME).decode("utf-8", "replace").strip() or "another process"
            message = f"{folder}: {holder} is working in this folder"
            hint = "wait for it to end, or work in another folder (--set run.name=... for a run)"
            raise LmkitError("storage.folder_busy", message, hint=hint)
        with suppress(OSError):  # the disk is full: the holder has no name then
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, f"process {os.getpid()} on {os.uname().nodename}".encode())
        return self

    def __getstate__(self) -> dict[str, Any]:
        from multiprocessing.reduction import DupFd

        assert self._descriptor is not None
        return {**self.__dict__, "_descriptor": DupFd(self._descriptor)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        descriptor = state["_descriptor"].detach()
        os.set_inheritable(descriptor, False)
        self.__dict__ |= {**state, "_descriptor": descriptor}

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor is None:
            return
        if kind is not None and self._made:
            with suppress(OSError):  # another process uses the folders by now, or deleted them
                if os.listdir(self.path.parent) == [self.path.name]:
                    self.path.unlink()
                    for folder in self._made:
                        folder.rmdir()
        with suppress(OSError):  # the disk is lost: the error of the block says so
            os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)
        self._descriptor = None
