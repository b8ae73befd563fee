"""Several processes that need a library build it once."""

import multiprocessing
import shutil
import subprocess

import pytest

from lmkit.storage.compiled import load_compiled

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def load(log, together):
    def build(path):
        with open(log, "a") as file:
            file.write("built\n")
        code = "int answer(void) { return 42; }"
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", path], input=code, text=True, check=True
        )

    together.wait()
    assert load_compiled("answer.so", build, what="the answer").answer() == 42


def test_several_processes_build_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fork = multiprocessing.get_context("fork")
    together = fork.Barrier(3)
    processes = [fork.Process(target=load, args=(tmp_path / "log", together)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "built\n"
    assert [path.name for path in (tmp_path / "lmkit").iterdir()] == ["answer.so"]
