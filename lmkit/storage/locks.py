"""Lock files and folders against a second writer.

The locks are the kernel's (`flock`): they end with their processes, so a killed process blocks nobody.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from lmkit.errors import LmkitError, reason
from lmkit.storage.inputs import open_input

_LONGEST_NAME = 200


def hold_file(path: Path) -> int | None:
    """Open and lock a file, creating it if it is missing.

    Returns the descriptor (closing it releases the lock), or None if another process holds the lock.

    Raises:
        LmkitError: the file system has no locks ("storage.no_locks").
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
            what = f"{path}: cannot be locked (flock): {reason(error)}"
            hint = "work on a disk that has locks; shares have mount options for them"
            raise LmkitError("storage.no_locks", what, hint=hint) from error
        if _is_named(descriptor, path):
            return descriptor
        # The last holder renamed or deleted the file between our open and our lock: open the path again.
        os.close(descriptor)


def _is_named(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


class FolderLock:
    """Hold `folder/.lock` inside the `with` block; a second holder gets an error at once.

    Missing folders are created. If the block fails and left them empty, they are removed again. The file names the
    process that holds it. A held lock can be an argument of a new process of multiprocessing: then that process holds
    it, too, until it ends.

    Raises:
        LmkitError: another process holds the lock ("storage.folder_busy").
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder) / ".lock"
        self._descriptor: int | None = None
        self._made: list[Path] = []

    def __enter__(self) -> FolderLock:
        folder = self.path.parent
        self._made = [place for place in (folder, *folder.parents) if not place.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        self._descriptor = hold_file(self.path)
        if self._descriptor is None:
            with open_input(self.path) as file:
                holder = file.read(_LONGEST_NAME).decode("utf-8", "replace").strip() or "another process"
            raise LmkitError(
                "storage.folder_busy",
                f"{folder}: {holder} is working in this folder",
                hint="wait for it to end, or work in another folder (--set run.name=... for a run)",
            )
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
