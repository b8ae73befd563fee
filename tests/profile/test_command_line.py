"""`lmkit profile` and `lmkit bench` as a user meets them: exit codes, messages, and what is left behind."""

import json
import sys

import pytest
from tiny import tiny_recipe

RECIPE = tiny_recipe('run.name="small"', "model.vocab_size=64", "train.batch_size=2", "train.steps=1")


@pytest.fixture
def path_without_nsys(tmp_path, monkeypatch):
    """A PATH on which Python is found and nsys is not."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "python").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(folder))
    return folder


def test_a_forced_nsys_that_is_missing_is_wrong_use(terminal, recipe, path_without_nsys, tmp_path):
    forced = ("profile", "nsys", recipe, "--engine", "nsys", "--output", "out")
    assert "--engine kineto" in terminal.refuses(*forced, code="nsys.missing").hint
    command = "profile nsys --output out -- sh -c true"
    assert "lmkit profile kineto RECIPE" in terminal.refuses(command, code="nsys.missing").hint
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_without_nsys_auto_takes_kineto(lmkit, recipe, path_without_nsys, tmp_path):
    auto = lmkit("profile", "nsys", recipe, "--steps", "1", "--output", "out")
    (line,) = auto.stderr.splitlines()  # and no lines of the profiler's own
    assert (auto.returncode, "profiling with kineto" in line) == (0, True)
    assert json.loads((tmp_path / "out" / "profile_summary.json").read_text())["engine"] == "kineto"


@pytest.mark.parametrize(("line", "code"), [("exit 7", 7), ("kill -9 $$", 137)])
def test_the_exit_code_of_the_profiled_command_is_ours(terminal, path_without_nsys, line, code):
    """A stand-in for nsys runs the command and records nothing."""
    nsys = path_without_nsys / "nsys"
    nsys.write_text('#!/bin/sh\nwhile [ "$1" != /bin/sh ]; do shift; done\nexec "$@"\n')
    nsys.chmod(0o755)
    command = ("profile", "nsys", "--output", "out", "--", "/bin/sh", "-c", line)
    refusal = terminal.refuses(*command, code="profile.command_failed", exit_code=code)
    assert "out" in refusal.hint


@pytest.mark.parametrize("bench", ["ddp", "optimizer", "all-reduce"])
def test_a_bench_of_ranks_with_one_process_is_wrong_use(terminal, tmp_path, bench):
    refusal = terminal.refuses(f"bench {bench} bench_ddp_cpu --output out", code="bench.needs_ranks")
    assert f"lmkit bench {bench} RECIPE --nproc 2" in refusal.hint
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("engine", ["kineto", "nsys"])
@pytest.mark.parametrize("name", ["notes.txt", "trace.zip", "report.qdstrm"])
def test_a_file_of_another_kind_is_told_from_a_recipe(terminal, tmp_path, name, engine):
    (tmp_path / name).write_text("hello")
    command = f"profile {engine} {name} --output out"
    assert ".nsys-rep" in terminal.refuses(command, code="trace.wrong_kind", says=(name,)).hint
    assert not (tmp_path / "out").exists()
