"""One writer per file, one per folder. The locks are the kernel's (`flock`): they vanish with their process, so that
what a kill -9 leaves behind holds up nobody."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from lmkit.errors import LmkitError


def hold_file(path: Path) -> int | None:
    """Open and lock a file, making it if there is none: the descriptor, whose end is the lock's; None while another
    process holds it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        if _is_named(descriptor, path):
            return descriptor
        # Between our open and our lock its holder finished: what we hold has another name by now, or none.
        os.close(descriptor)


def _is_named(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


class FolderLock:
    """Hold `folder/.lock` while inside the `with` block; a second holder gets an error at once.

    Missing folders are made; those that stay empty because the block failed are removed again.

    Raises:
        LmkitError: another process holds the lock.
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
            raise LmkitError(
                f"{folder}: another process is working in this folder",
                hint="wait for it to end, or work in another folder (--set run.name=... for a run)",
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor is None:
            return
        if kind is not None and self._made:
            with suppress(OSError):  # somebody else uses them by now, or deleted them
                if os.listdir(self.path.parent) == [self.path.name]:
                    self.path.unlink()
                    for folder in self._made:
                        folder.rmdir()
        os.close(self._descriptor)
        self._descriptor = None
