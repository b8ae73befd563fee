"""What a file format is to the fuzzer: good files, how they are damaged, how they are read, and what a right load is.

`read` raises `LmkitError`, or has checked that what was read is what the files say, found out in another way than the
reader's: parsed again by a plain parser, or compared with the undamaged content where a checksum protects it.
"""

from __future__ import annotations

import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from random import Random

if sys.version_info >= (3, 11):
    pass
else:
    pass


Files = dict[str, bytes]
Mutation = Callable[[Random, bytes], bytes]


class Format(ABC):
    """One kind of file, or several that belong together.

    Args:
        folder: a place for what is made once.
    """

    name: str
    damages: tuple[tuple[str, Mutation], ...]
    """(file, mutation); each case takes one of these."""

    def __init__(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.good = self.make(folder)

    @abstractmethod
    def make(self, folder: Path) -> Files:
        """The undamaged files."""

    @abstractmethod
    def read(self, folder: Path, random: Random) -> None:
        """Read what is in `folder`.

        Raises:
            LmkitError: the files are damaged.
            AssertionError: they were read, but wrongly.
        """

    def damaged(self, random: Random) -> Files:
        victim, mutate = random.choice(self.damages)
        return {**self.good, victim: mutate(random, self.good[victim])}

    def try_undamaged(self, folder: Path) -> None:
        """What is good must load."""
        shutil.rmtree(folder, ignore_errors=True)
        for name, data in self.good.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        self.read(folder, Random(0))
        self.close()
        shutil.rmtree(folder)

    def close(self) -> None:  # noqa: B027 (most have nothing to do)
        """No more cases."""


def is_changed(path: Path, good: bytes) -> bool:
    return path.read_bytes() != good
