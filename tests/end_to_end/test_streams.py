"""Streams that are closed, full or lose their reader, and limits of the shell, under the real commands."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from marking import full_but, full_except
from programs import run_program
from sessions import records, write_tokens
from tiny import tiny_recipe

from lmkit.training.checkpoint import saved_steps

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="a file that is full, as Linux has it")
Shell = Callable[[str], "subprocess.CompletedProcess[str]"]

STEPS = 150
RECIPE = tiny_recipe(
    *('data.train="train.npy"', 'data.valid="valid.npy"', "train.batch_size=8"),
    *(f"train.steps={STEPS}", "train.log_interval=1", "train.eval_interval=100"),
)


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """Run a line of shell in which `lmkit` is the real command; `tiny.toml` is there."""
    write_tokens(tmp_path)
    (tmp_path / "tiny.toml").write_text(RECIPE)

    def run(line: str) -> subprocess.CompletedProcess[str]:
        script = f'lmkit() {{ {sys.executable} -m lmkit "$@"; }}; {line}'
        return run_program("sh", "-c", script, cwd=tmp_path)

    return run


LOST = ("2>/dev/full", "2>&1 | head -2", "2>&-")


@pytest.mark.parametrize(
    "lost", full_except(*(f"{ranks}{end}" for ranks in ("", "--nproc 2 ") for end in LOST))
)
def test_fault_96_who_loses_the_log_does_not_lose_the_run(lost, shell, tmp_path):
    done = shell(f"lmkit train tiny.toml {lost}")
    run = tmp_path / "runs" / "run"
    assert done.returncode == 0, done.stdout
    assert [saved.step for saved in saved_steps(run / "checkpoints")] == [STEPS]
    steps = [record["step"] for record in records(run) if record["kind"] == "train"]
    assert steps == [*range(1, STEPS + 1)]
    assert "Traceback" not in done.stdout + done.stderr
    assert "head" not in lost or len(done.stdout.splitlines()) == 2


@pytest.mark.parametrize("where", [">&-", ">/dev/full"])
@pytest.mark.parametrize(
    "command", full_but(["--help", "--version"], ["--help", "--version", "train tiny.toml --steps 2"])
)
def test_output_that_cannot_be_written_is_one_line(command, where, shell, tmp_path):
    commands = [command]
    if command.startswith("train"):
        commands.append("evaluate runs/run")
    for each in commands:
        done = shell(f"lmkit {each} {where}")
        assert done.returncode == 1
        *before, error, hint = done.stderr.splitlines()
        assert error.startswith("error[output.lost]: stdout: ")
        assert hint.startswith("hint: ")
        assert not any(line.startswith(("error", "Traceback")) for line in before), done.stderr
    if command.startswith("train"):  # but nothing is lost
        assert [saved.step for saved in saved_steps(tmp_path / "runs" / "run" / "checkpoints")] == [2]


@pytest.mark.parametrize(
    ("line", "code", "limit"),
    [
        ("ulimit -v 300000; lmkit train tiny.toml", "memory.exhausted", "ulimit -v, which is 300000 kB here"),
        (
            "ulimit -n 20; lmkit train tiny.toml --nproc 2",
            "files.too_many_open",
            "ulimit -n, which is 20 here",
        ),
    ],
)
def test_a_limit_of_the_shell_is_named(line, code, limit, shell):
    done = shell(line)
    assert done.returncode == 1
    error, hint = done.stderr.splitlines()[-2:]
    assert error.startswith(f"error[{code}]: ")
    assert hint.startswith("hint: ")
    assert limit in hint
    assert "Traceback" not in done.stderr
