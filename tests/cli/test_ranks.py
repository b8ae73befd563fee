"""One error is one line, however many ranks meet it: under --nproc, and under torchrun, where each could print it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Lmkit = Callable[..., "subprocess.CompletedProcess[str]"]

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
RECIPE = """
[run]
device = "cpu"
folder = "runs"
[data]
train = "tokens.npy"
[model]
d_model = 16
d_ff = 32
num_layers = 1
num_heads = 2
context_length = 8
[train]
steps = 4
batch_size = 4
"""


@pytest.fixture
def torchrun(tmp_path: Path) -> Lmkit:
    """Two ranks of a shell command, which can look at $RANK."""

    def run(command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*TORCHRUN, "--no-python", "sh", "-c", f"lmkit() {{ exec {sys.executable} -m lmkit $@; }}; {command}"],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )  # fmt: skip

    return run


def lines(result: subprocess.CompletedProcess[str], start: str) -> list[str]:
    return [line for line in result.stderr.splitlines() if line.startswith(start)]


def test_missing_tokens_are_one_line_with_file_key_and_command(lmkit: Lmkit) -> None:
    alone = lmkit("train", "quickstart", "--set", "run.name=two")
    started = lmkit("train", "quickstart", "--set", "run.name=two", "--nproc", "2")
    assert alone.stderr == started.stderr
    assert (alone.returncode, started.returncode, alone.stdout) == (2, 2, "")
    error, hint = alone.stderr.splitlines()
    assert error == (
        "error: artifacts/runs/two/tokens/train.npy: no such token file to train on (key data.train)"
    )
    assert hint.startswith("hint: make it with: lmkit run RECIPE --set run.name=two; ")


def test_the_hint_does_not_send_to_a_command_that_cannot_help(lmkit: Lmkit, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    named = lmkit("train", recipe).stderr
    assert "error: tokens.npy: no such token file" in named
    assert "lmkit data encode TEXT tokens.npy" in named
    recipe.write_text(RECIPE.replace('train = "tokens.npy"', ""))
    unnamed = lmkit("train", recipe).stderr
    assert "lmkit data encode TEXT runs/run/tokens/train.npy" in unnamed
    assert "lmkit run" not in unnamed


def test_under_torchrun_an_error_of_all_ranks_is_said_once_and_its_summary_holds_no_traceback_of_ours(
    torchrun: Lmkit,
) -> None:
    result = torchrun("lmkit train quickstart --set run.name=two")
    message = "rank 0: artifacts/runs/two/tokens/train.npy: no such token file to train on (key data.train)"
    assert lines(result, "error: ") == [f"error: {message}"]
    assert lines(result, "  traceback : ")[-1] == f"  traceback : {message}"
    assert "lmkit/commands" not in result.stderr


def test_under_torchrun_the_cause_is_said_and_not_the_connection_it_broke(
    torchrun: Lmkit, lmkit: Lmkit, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("one fish two fish red fish blue fish\n" * 50)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    for command in (
        ("tokenizer", "train", "text.txt", "t.json", "--vocab-size", "260"),
        ("data", "encode", "text.txt", "tokens.npy", "--tokenizer", "t.json"),
    ):
        assert lmkit(*command).returncode == 0
    (tmp_path / "cut.npy").write_bytes((tmp_path / "tokens.npy").read_bytes()[:-100])
    (tmp_path / "cut.json").write_bytes((tmp_path / "tokens.json").read_bytes())
    result = torchrun(
        "if [ $RANK = 1 ]; then cut='--set data.train=cut.npy'; fi; lmkit train recipe.toml $cut"
    )
    (error,) = lines(result, "error: ")
    assert error.startswith("error: rank 1: cut.npy: ")
