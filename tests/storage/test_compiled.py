"""Libraries in the cache: several processes build one once, and a damaged one is built again."""

import ctypes
import multiprocessing
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lmkit.storage.compiled import load_compiled

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
CODE = "char room[50000] = {1}; int answer(void) { return 42; }"


def build(log):
    """Return a function that compiles `CODE`, and writes a line into `log`."""

    def compile_to(path):
        with open(log, "a") as file:
            file.write("built\n")
        command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", path]
        subprocess.run(command, input=CODE, text=True, check=True)

    return compile_to


def load(log, together=None):
    if together is not None:
        together.wait()
    assert load_compiled("answer", build(log), what="the answer").answer() == 42


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "lmkit"


def in_processes(number, *arguments):
    """Load the library in processes of their own: what a process has loaded is found again. Return the exit codes."""
    fork = multiprocessing.get_context("fork")
    together = fork.Barrier(number)
    processes = [fork.Process(target=load, args=(*arguments, together)) for _ in range(number)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def test_several_processes_build_once(cache, tmp_path):
    assert in_processes(3, tmp_path / "log") == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "built\n"
    (kept,) = cache.iterdir()
    assert kept.name.startswith("answer-")
    assert in_processes(1, tmp_path / "log") == [0]
    assert (tmp_path / "log").read_text() == "built\n"


def test_a_kept_library_needs_no_folder_for_temporary_files(cache, tmp_path, monkeypatch):
    assert in_processes(1, tmp_path / "log") == [0]
    monkeypatch.setattr(tempfile, "TemporaryDirectory", pytest.fail)
    assert in_processes(1, tmp_path / "log") == [0]


@pytest.mark.parametrize("size", [0, 10, 5000, 40_000, None])
def test_a_damaged_library_is_built_again(cache, tmp_path, size):
    """A library that is cut ends a process by SIGBUS, zeros in its code by SIGSEGV."""
    assert in_processes(1, tmp_path / "log") == [0]
    (kept,) = cache.iterdir()
    whole = kept.read_bytes()
    zeros = whole[:4096] + bytes(len(whole) - 4096)
    kept.write_bytes(zeros if size is None else whole[:size])
    assert in_processes(2, tmp_path / "log") == [0, 0]
    assert (tmp_path / "log").read_text() == "built\nbuilt\n"
    (kept,) = cache.iterdir()
    assert kept.read_bytes()[:4] == b"\x7fELF"


def test_a_library_is_loaded_from_elsewhere_where_no_file_may_be_run(cache, tmp_path, monkeypatch, caplog):
    real = ctypes.CDLL

    def noexec(path, *arguments):
        if path.startswith(str(cache)):
            raise OSError(f"{path}: failed to map segment from shared object")
        return real(path, *arguments)

    monkeypatch.setattr(ctypes, "CDLL", noexec)
    for _ in range(2):
        load(tmp_path / "log")
    assert (tmp_path / "log").read_text() == "built\n"
    assert caplog.records == []


@pytest.mark.parametrize("why", ["a file is in the way", "no home directory"])
def test_a_cache_that_cannot_be_written_to_is_said_once(why, tmp_path, monkeypatch, caplog):
    def no_home():
        raise RuntimeError(why)

    (tmp_path / why).touch()
    monkeypatch.setenv("XDG_CACHE_HOME", "" if "home" in why else str(tmp_path / why))
    monkeypatch.setattr(Path, "home", no_home)
    load(tmp_path / "log")
    (record,) = caplog.records
    assert why in record.getMessage()


def test_a_full_disk_keeps_nothing(cache, tmp_path):
    """Under a limit for the size of files: the library is loaded, and no part of it stays."""
    script = (
        "import resource, signal, pathlib\n"
        "from lmkit.storage import compiled\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"library = pathlib.Path({str(tmp_path / 'library')!r}).read_bytes()\n"
        "def build(path): path.write_bytes(library)\n"
        "write = compiled.write_atomic\n"
        "def limited(*arguments):\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))\n"
        "    try: return write(*arguments)\n"
        "    finally: resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))\n"
        "compiled.write_atomic = limited\n"
        "assert compiled.load_compiled('answer', build, what='the answer').answer() == 42\n"
    )
    build(tmp_path / "log")(tmp_path / "library")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "the answer" in done.stderr
    assert list(cache.iterdir()) == []
