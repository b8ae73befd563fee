"""`lmkit profile` and `lmkit bench` as a user meets them: exit codes, messages, and what is left behind."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from lmkit.cli.app import run_command_line
from lmkit.profile.nsys import find_nsys

RECIPE = """
[run]
name = "small"
device = "cpu"
[model]
vocab_size = 64
context_length = 16
d_model = 32
d_ff = 64
num_layers = 1
num_heads = 2
[train]
batch_size = 2
steps = 1
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(RECIPE)
    return path


def path_without_nsys(folder: Path) -> str:
    """A PATH on which Python is found and nsys is not."""
    folder.mkdir()
    (folder / "python").symlink_to(sys.executable)
    return str(folder)


@pytest.mark.parametrize("kind", ["kineto", "memory"])
def test_the_terminal_has_no_lines_of_the_profilers_own(kind, lmkit, recipe):
    result = lmkit("profile", kind, recipe, "--steps", "1", "--output", "out")
    assert (result.returncode, result.stderr) == (0, "")


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run a command line in this process, in an empty folder; return exit code, error line and hint."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        code = run_command_line([str(word) for word in words])
        error, hint = capsys.readouterr().err.splitlines()[-2:]
        return code, error, hint

    return run


def last_lines(result):
    error, hint = result.stderr.splitlines()[-2:]
    return error, hint


def test_fault_87_without_nsys_auto_takes_kineto_and_a_forced_nsys_is_wrong_use(lmkit, recipe, tmp_path):
    path = path_without_nsys(tmp_path / "bin")
    forced = lmkit("profile", "nsys", recipe, "--engine", "nsys", "--output", "out", PATH=path)
    error, hint = last_lines(forced)
    assert (forced.returncode, "nsys.missing" in error) == (2, True)
    assert "--engine kineto" in hint
    assert not (tmp_path / "out").exists()
    auto = lmkit("profile", "nsys", recipe, "--steps", "1", "--output", "out", PATH=path)
    assert auto.returncode == 0, auto.stderr
    assert "profiling with kineto" in auto.stderr
    assert json.loads((tmp_path / "out" / "profile_summary.json").read_text())["engine"] == "kineto"
    command = lmkit("profile", "nsys", "--output", "out2", "--", "sh", "-c", "exit 3", PATH=path)
    assert command.returncode == 2
    assert "lmkit profile kineto RECIPE" in last_lines(command)[1]
    assert not (tmp_path / "out2").exists()


def test_fault_89_the_exit_code_of_the_profiled_command_is_ours(lmkit, tmp_path):
    nsys = find_nsys()
    if nsys is None:  # a stand-in that runs the command and records nothing
        nsys = tmp_path / "bin" / "nsys"
        nsys.parent.mkdir()
        nsys.write_text('#!/bin/sh\nwhile [ "$1" != sh ]; do shift; done\nexec "$@"\n')
        nsys.chmod(0o755)
    path = os.pathsep.join([str(nsys.parent), os.environ["PATH"]])
    result = lmkit("profile", "nsys", "--output", "out", "--", "sh", "-c", "exit 7", PATH=path)
    assert result.returncode == 7, result.stderr
    error, hint = last_lines(result)
    assert "profile.command_failed" in error
    assert "out" in hint


def test_fault_86_a_bench_of_ranks_with_one_process_is_wrong_use(run, tmp_path):
    for bench in ("ddp", "optimizer", "all-reduce"):
        code, error, hint = run("bench", bench, "bench_ddp_cpu", "--output", "out")
        assert (code, f"bench {bench}" in error) == (2, True)
        assert f"lmkit bench {bench} RECIPE --nproc 2" in hint
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["notes.txt", "trace.zip", "report.qdstrm"])
def test_a_file_of_another_kind_is_told_from_a_recipe(run, tmp_path, name):
    (tmp_path / name).write_text("hello")
    for engine in ("kineto", "nsys"):
        code, error, hint = run("profile", engine, name, "--output", "out")
        assert (code, "trace.wrong_kind" in error, name in error, ".nsys-rep" in hint) == (
            2,
            True,
            True,
            True,
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(find_nsys() is None, reason="nsys (Nsight Systems) is not installed")
def test_the_real_nsys_profiles_lmkit_itself(lmkit, recipe, tmp_path):
    """A command of ours under nsys, with its ranges where NVTX can be marked."""
    shutil.copy(recipe, tmp_path / "copy.toml")
    result = lmkit("profile", "nsys", "--output", "out", "--", "lmkit", "recipe", "show", "copy.toml")
    assert result.returncode == 0, result.stderr
    summary = json.loads((tmp_path / "out" / "profile_summary.json").read_text())
    assert (summary["engine"], summary["launches"]) == ("nsys", None)
    again = lmkit("profile", "nsys", "out/profile.nsys-rep", "--output", "again", "--json")
    assert json.loads(again.stdout)["summary"]["window_ms"] == summary["window_ms"]
