"""One writer per folder, and no lock that outlives its holder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lmkit.errors import LmkitError
from lmkit.storage import FolderLock


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_one_holder_at_a_time_and_the_next_when_it_leaves(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with FolderLock(folder):
        for _ in range(2):  # a refusal changes nothing
            with pytest.raises(LmkitError, match="another process") as caught, FolderLock(folder):
                pass
        assert str(folder) in caught.value.message
        with FolderLock(tmp_path / "other"):
            pass
    with pytest.raises(ZeroDivisionError), FolderLock(folder):
        raise ZeroDivisionError
    with FolderLock(folder):
        pass


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files through /proc")
def test_no_file_stays_open(tmp_path: Path) -> None:
    before = open_files()
    with FolderLock(tmp_path), pytest.raises(LmkitError), FolderLock(tmp_path):
        pass
    assert open_files() == before
