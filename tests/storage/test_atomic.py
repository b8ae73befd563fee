"""Files are whole or absent: under errors, after kills, and when the power goes."""

import errno
import fcntl
import os
import signal
import sys
from pathlib import Path

import pytest
from programs import run_program
from raising import raises

from lmkit.errors import LmkitError, UsageError
from lmkit.storage.atomic import atomic_folder, atomic_path, remove_partials, scratch_folder, write_atomic


def test_content_is_on_disk_before_its_name_and_that_before_the_call_returns(tmp_path, synced_and_named):
    path = tmp_path / "new" / "folder" / "file"
    write_atomic(path, b"content")
    file, folder = path.stat().st_ino, path.parent.stat().st_ino
    assert path.read_bytes() == b"content"
    assert synced_and_named == [("synced", file), ("named", file), ("synced", folder)]


def test_an_error_leaves_the_old_content_and_no_partial_file(tmp_path):
    path = tmp_path / "file"
    write_atomic(path, "old\r\n")

    def write_half_of_it():
        with atomic_path(path) as partial:
            partial.write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_half_of_it()
    with pytest.raises(FileNotFoundError), atomic_path(path) as partial:
        partial.unlink()
    assert path.read_bytes() == b"old\r\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_disk_without_room_is_told_with_the_final_name_and_other_errors_as_they_are(tmp_path):
    path = tmp_path / "file"
    full = OSError(errno.ENOSPC, "no space")
    with pytest.raises(OSError, match="no space") as caught, atomic_path(path):
        raise full
    assert caught.value.filename == str(path)
    with pytest.raises(OSError, match="no space") as caught, atomic_folder(path):
        raise OSError(errno.ENOSPC, "no space")
    assert caught.value.filename == str(path)
    for error in (OSError(errno.EIO, "broken"), OSError(errno.ENOSPC, "no space", "another file")):
        before = error.filename
        with pytest.raises(OSError, match=r"broken|no space") as caught, atomic_path(path):
            raise error
        assert caught.value.filename == before


def test_a_folder_that_no_rename_replaces_is_refused_before_it_is_written(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    with atomic_folder(tmp_path / "link") as partial:  # what it names is replaced
        (partial / "file").write_text("content")
    assert (tmp_path / "empty" / "file").read_text() == "content"
    assert (tmp_path / "link").is_symlink()
    (tmp_path / "current").mkdir()
    monkeypatch.chdir(tmp_path / "current")
    monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path / "mounted")
    (tmp_path / "mounted").mkdir()
    for place in (Path(), tmp_path / "current", tmp_path / "mounted"):
        with raises(UsageError, "output.exists", place, hint=f"{place / 'model'}"), atomic_folder(place):
            pass
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "link", "current", "mounted"}


def test_a_second_writer_is_refused_and_the_first_one_finishes(tmp_path):
    path = tmp_path / "file"
    with atomic_path(path) as partial:
        partial.write_text("first")
        for _ in range(2):  # a refusal changes nothing
            with raises(LmkitError, "storage.file_busy", path):
                write_atomic(path, "second")
        assert remove_partials(tmp_path) == []  # that of a writer who lives is not left behind
    assert path.read_text() == "first"
    write_atomic(path, "third")
    assert path.read_text() == "third"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("ending", ["done", "failed"])
def test_a_writer_that_ends_just_as_the_next_one_comes_keeps_its_file(ending, tmp_path, monkeypatch):
    """Opened before it was renamed, its partial file must not be taken for one that is left over."""
    path, partial = tmp_path / "file", tmp_path / "file.lmkit-partial"
    partial.write_text("first")
    flock, calls = fcntl.flock, []

    def too_late(descriptor, operation):
        calls.append(descriptor)
        if len(calls) == 1:
            os.replace(partial, path) if ending == "done" else partial.unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", too_late)
    with atomic_path(path) as ours:
        ours.write_text("second")
        assert not path.exists() if ending == "failed" else path.read_text() == "first"
    assert path.read_text() == "second"
    assert len(calls) == 2


def test_a_scratch_folder_of_a_killed_process_goes_with_the_next_and_that_of_a_living_one_stays(tmp_path):
    killed = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom lmkit.storage.atomic import scratch_folder\n"
        "with scratch_folder(Path(sys.argv[1])) as made:\n"
        "    (made / 'text').write_text('large')\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    (tmp_path / "mine").mkdir()
    done = run_program(sys.executable, "-c", killed, tmp_path, cwd=Path.cwd())
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.glob("*/text")
    with scratch_folder(tmp_path) as one:
        assert not left.exists()
        with scratch_folder(tmp_path) as other:
            assert one.is_dir()
            assert one != other
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
