"""One writer per folder, and no lock that outlives its holder."""

import errno
import fcntl
import multiprocessing
import os
from multiprocessing.connection import Connection

import pytest
from raising import raises

from lmkit.errors import LmkitError
from lmkit.storage.atomic import FolderLock, write_atomic


def test_one_holder_at_a_time_and_the_next_when_it_leaves(tmp_path):
    folder = tmp_path / "run"
    with FolderLock(folder):
        for _ in range(2):  # a refusal changes nothing
            with raises(LmkitError, "storage.folder_busy", folder), FolderLock(folder):
                pass
        with FolderLock(tmp_path / "other"):
            pass
    with pytest.raises(ZeroDivisionError), FolderLock(folder):
        raise ZeroDivisionError
    with FolderLock(folder):
        pass


def hold_until_told(lock: FolderLock, link: Connection) -> None:
    link.send("started")
    link.recv()


def test_fault_120_a_process_that_was_given_the_lock_holds_it_until_it_ends(tmp_path):
    """A rank goes on for a moment when the process that started it was killed."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with FolderLock(tmp_path) as lock:
        process = context.Process(target=hold_until_told, args=(lock, theirs))
        process.start()
        ours.recv()
    with raises(LmkitError, "storage.folder_busy"), FolderLock(tmp_path):
        pass
    ours.send("end")
    process.join()
    with FolderLock(tmp_path):
        pass


def test_fault_120_who_holds_a_folder_is_named(tmp_path):
    named = f"process {os.getpid()} on {os.uname().nodename}"
    with FolderLock(tmp_path), raises(LmkitError, "storage.folder_busy", named), FolderLock(tmp_path):
        pass
    with FolderLock(tmp_path):
        (tmp_path / ".lock").write_text("")  # it has not written its name yet, or there was no room for it
        with raises(LmkitError, "storage.folder_busy", "another process"), FolderLock(tmp_path):
            pass


def test_what_fails_before_it_wrote_anything_leaves_no_folder(tmp_path):
    def fail(folder: str, *written: str) -> None:
        with FolderLock(tmp_path / folder):
            for name in written:
                (tmp_path / folder / name).touch()
            raise ZeroDivisionError

    (tmp_path / "mine").mkdir()
    for folder, *written in (["benches/run/ddp"], ["mine"], ["mine/new"], ["run", "rows.jsonl"]):
        with pytest.raises(ZeroDivisionError):
            fail(folder, *written)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert left == ["mine", "mine/.lock", "run", "run/.lock", "run/rows.jsonl"]


def test_a_share_without_locks_is_named(tmp_path, monkeypatch):
    """As Lustre answers, unless it is mounted with them."""

    def refuse(descriptor, operation):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with raises(LmkitError, "storage.no_locks", tmp_path / ".lock"), FolderLock(tmp_path):
        pass
    with raises(LmkitError, "storage.no_locks", tmp_path / "file"):
        write_atomic(tmp_path / "file", "content")
