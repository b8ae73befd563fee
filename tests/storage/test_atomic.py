"""Files are whole or absent: under errors, after kills, and when the power goes."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest

from lmkit.storage import atomic_path, remove_partials, sha256_file, write_atomic


def test_content_lies_on_the_disk_before_it_gets_its_name_and_the_name_before_the_call_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No test can cut the power; the order in which things are made to last can be watched."""
    events: list[tuple[str, int]] = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(descriptor: int) -> None:
        events.append(("synced", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    def watched_replace(source: Path, target: Path) -> None:
        assert source.read_bytes() == b"content"
        events.append(("named", source.stat().st_ino))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    path = tmp_path / "new" / "folder" / "file"
    write_atomic(path, b"content")
    file, folder = path.stat().st_ino, path.parent.stat().st_ino
    assert events == [("synced", file), ("named", file), ("synced", folder)]


def test_an_error_leaves_the_old_content_and_no_partial_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, "old\r\n")

    def write_half_of_it() -> None:
        with atomic_path(path) as partial:
            partial.write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_half_of_it()
    with pytest.raises(FileNotFoundError), atomic_path(path):
        pass  # nobody wrote anything
    assert path.read_bytes() == b"old\r\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_disk_without_room_is_told_with_the_final_name_and_other_errors_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "file"
    full = OSError(errno.ENOSPC, "no space")
    with pytest.raises(OSError, match="no space") as caught, atomic_path(path):
        raise full
    assert caught.value.filename == str(path)
    for error in (OSError(errno.EIO, "broken"), OSError(errno.ENOSPC, "no space", "another file")):
        before = error.filename
        with pytest.raises(OSError, match=r"broken|no space") as caught, atomic_path(path):
            raise error
        assert caught.value.filename == before


def test_partial_files_of_killed_processes_are_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in ("b.partial", "a.partial", "a", "partial"):
        (tmp_path / name).write_text("")
    (tmp_path / "folder.partial").mkdir()
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "c.partial").write_text("")
    assert [path.name for path in remove_partials(tmp_path)] == ["a.partial", "b.partial"]
    assert {path.name for path in tmp_path.iterdir()} == {"a", "partial", "folder.partial", "deeper"}
    assert (tmp_path / "deeper" / "c.partial").exists()


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1])
def test_the_digest_is_that_of_all_bytes(size: int, tmp_path: Path) -> None:
    data = os.urandom(size)
    (tmp_path / "file").write_bytes(data)
    assert sha256_file(tmp_path / "file") == hashlib.sha256(data).hexdigest()
