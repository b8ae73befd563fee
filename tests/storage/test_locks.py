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
            with pytest.raises(LmkitError) as caught, FolderLock(folder):
                pass
            assert caught.value.code == "storage.folder_busy"
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


def fail_in(folder: Path, *files: str) -> None:
    def work() -> None:
        with FolderLock(folder):
            for name in files:
                (folder / name).touch()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()


def test_what_fails_before_it_wrote_anything_leaves_no_folder(tmp_path: Path) -> None:
    fail_in(tmp_path / "benches" / "run" / "ddp")
    assert not list(tmp_path.iterdir())

    (tmp_path / "benches").mkdir()
    (tmp_path / "benches" / "mine.txt").touch()
    fail_in(tmp_path / "benches" / "run" / "ddp")
    assert [path.name for path in (tmp_path / "benches").iterdir()] == ["mine.txt"]

    fail_in(tmp_path / "written", "rows.jsonl")
    assert (tmp_path / "written" / "rows.jsonl").exists()

    (tmp_path / "empty").mkdir()
    fail_in(tmp_path / "empty")
    assert (tmp_path / "empty").is_dir(), "it was there before"
    with FolderLock(tmp_path / "empty"):
        pass
