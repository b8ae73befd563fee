"""One writer per folder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType

from lmkit.errors import LmkitError


class FolderLock:
    """Hold `folder/.lock` while inside the `with` block; a second holder gets an error at once.

    The lock is the kernel's (`flock`): it vanishes with its process, so that a kill -9 leaves nothing to clean.

    Raises:
        LmkitError: another process holds the lock.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder) / ".lock"
        self._descriptor: int | None = None

    def __enter__(self) -> FolderLock:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise LmkitError(
                f"{self.path.parent}: another process is working in this folder",
                hint="wait for it to end, or work in another folder (--set run.name=... for a run)",
            ) from None
        self._descriptor = descriptor
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
