"""Ranks under the real launchers: one is killed, one hangs, torchrun is told to stop."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from lmkit.training.checkpoint import newest_valid, open_checkpoint

Lmkit = Callable[..., "subprocess.CompletedProcess[str]"]
Start = Callable[..., "subprocess.Popen[str]"]

RECIPE = """
[run]
folder = "runs"
device = "cpu"
threads = 1
[data]
source = "random"
[model]
vocab_size = 64
d_model = 16
d_ff = 32
num_layers = 1
num_heads = 2
context_length = 8
[train]
steps = 1000000
batch_size = 8
log_interval = 1
[checkpoint]
interval = 50
[parallel]
strategy = "zero1"
"""
# `lmkit`, whose ranks wait 8 s for one another from the end of the first step on: before that they load torch and its
# compiler, and on a slow machine one of them is done long before the other.
IMPATIENT = """
from datetime import timedelta
import torch.distributed as dist
from lmkit.__main__ import main
from lmkit.training.trainer import Trainer

count = Trainer._count

def lose_patience(loop, outcome):
    object.__setattr__(loop.ranks, "timeout_s", 8.0)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=8))
    count(loop, outcome)

Trainer._count = lose_patience  # in the ranks too: they import what started them
if __name__ == "__main__":
    main()
"""
PATIENCE_S = 240.0
"""Only to end a test that hangs: far above what a slow machine needs, far below the ranks' timeout of 600 s."""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "endless.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def start(recipe: Path) -> Iterator[Start]:
    """Starts a command in a session of its own and waits for its first progress line."""
    started: list[subprocess.Popen[str]] = []

    def begin(*command: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=recipe.parent,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("step "):
                return process
        raise AssertionError(f"ended before its first step: {process.wait()}")

    yield begin
    for process in started:
        for pid in members(process.pid):
            with suppress(ProcessLookupError):  # ended meanwhile
                os.kill(pid, signal.SIGKILL)
        process.wait()


def members(session: int) -> list[int]:
    """The living processes of a session, oldest first."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        if fields[0] != "Z" and int(fields[3]) == session:
            found.append((int(fields[19]), int(entry.name)))
    return [pid for _, pid in sorted(found)]


def all_end(session: int, within_s: float = PATIENCE_S) -> bool:
    """Whether no process of a session is left soon: multiprocessing's resource tracker ends by itself, but only once
    it has seen that everybody else is gone."""
    deadline = time.monotonic() + within_s
    while members(session):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """The processes of the ranks that `--nproc` spawned, in order."""
    return [pid for pid in members(process.pid) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="finds processes through /proc, which is Linux's"
)


@needs_proc
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.full), 1])
def test_fault_72_a_killed_rank_ends_the_job_and_is_named(victim: int, start: Start, recipe: Path) -> None:
    process = start("-m", "lmkit", "train", str(recipe), "--nproc", "2")
    os.kill(ranks_of(process)[victim], signal.SIGKILL)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (1, "")
    assert f"rank {victim} was killed by SIGKILL" in err
    assert "Traceback" not in err
    assert all_end(process.pid)


@pytest.mark.full
@needs_proc
def test_fault_73_a_rank_that_hangs_ends_the_job_at_the_timeout_and_is_named(
    start: Start, recipe: Path, tmp_path: Path
) -> None:
    program = tmp_path / "impatient.py"
    program.write_text(IMPATIENT)
    process = start(str(program), "train", str(recipe), "--nproc", "2")
    os.kill(ranks_of(process)[1], signal.SIGSTOP)
    began = time.monotonic()
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (
        time.monotonic() - began >= 8
    )  # and a roll call of two, and twice three for a stopped process to end
    assert (process.returncode, out) == (1, "")
    silence = "no answer within 8 s; no sign of rank 1 in 2 s more"
    assert re.search(rf"rank 0, (after )?step \d+: {silence}\n", err), err
    assert "Traceback" not in err
    assert all_end(process.pid)


@pytest.mark.full
def test_fault_69_under_torchrun_a_signal_saves_once_on_all_ranks(
    start: Start, lmkit: Lmkit, recipe: Path
) -> None:
    process = start(*TORCHRUN, "-m", "lmkit", "train", str(recipe))
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1  # torchrun's own code, whatever its ranks return
    (step,) = map(int, re.findall(r"stopped by a signal; step (\d+) is saved", err))
    choice = newest_valid(recipe.parent / "runs" / "run" / "checkpoints")
    assert choice.path is not None
    assert choice.skipped == ()
    state = open_checkpoint(choice.path).state
    assert (state.step, state.world_size, state.optimizer_shards) == (step, 2, 2)
    resumed = lmkit("train", recipe, "--nproc", "2", "--stop-at-step", str(step + 1), "--json")
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout)["resumed_from"] == step
