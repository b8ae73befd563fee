"""Ranks under the real launchers: one is killed, one hangs, torchrun is told to stop."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from sessions import PATIENCE_S, TORCHRUN, members, start, wait_for_all

from lmkit.training.atomic_checkpoint import newest_valid
from lmkit.training.checkpoint import open_checkpoint

Lmkit = Callable[..., "subprocess.CompletedProcess[str]"]
Begin = Callable[..., "subprocess.Popen[str]"]

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


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "endless.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def begin(recipe: Path) -> Iterator[Begin]:
    """`begin(command...)` starts a command and waits for its first progress line."""
    started: list[subprocess.Popen[str]] = []

    def one(*command: str) -> subprocess.Popen[str]:
        started.append(start(*command, cwd=recipe.parent))
        return started[-1]

    yield one
    for process in started:
        for pid in members(process.pid).values():
            with suppress(ProcessLookupError):  # ended meanwhile
                os.kill(pid, signal.SIGKILL)
        process.wait()


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="finds processes through /proc, which is Linux's"
)


@needs_proc
@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 1])
def test_fault_72_a_killed_rank_ends_the_job_and_is_named(victim: int, begin: Begin, recipe: Path) -> None:
    process = begin("-m", "lmkit", "train", str(recipe), "--nproc", "2")
    os.kill(members(process.pid)[f"rank {victim}"], signal.SIGKILL)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (1, "")
    assert f"rank {victim} was killed by SIGKILL" in err
    assert "Traceback" not in err
    wait_for_all(process.pid)


@pytest.mark.full
@needs_proc
def test_fault_73_a_rank_that_hangs_ends_the_job_at_the_timeout_and_is_named(
    begin: Begin, recipe: Path, tmp_path: Path
) -> None:
    program = tmp_path / "impatient.py"
    program.write_text(IMPATIENT)
    process = begin(str(program), "train", str(recipe), "--nproc", "2")
    os.kill(members(process.pid)["rank 1"], signal.SIGSTOP)
    began = time.monotonic()
    out, err = process.communicate(timeout=PATIENCE_S)
    # And a roll call of two, and twice three for a stopped process to end.
    assert time.monotonic() - began >= 8
    assert (process.returncode, out) == (1, "")
    silence = "no answer within 8 s; no sign of rank 1 in 2 s more"
    assert re.search(rf"rank 0, (after )?step \d+: {silence}\n", err), err
    assert "Traceback" not in err
    wait_for_all(process.pid)


@pytest.mark.full
def test_fault_69_under_torchrun_a_signal_saves_once_on_all_ranks(
    begin: Begin, lmkit: Lmkit, recipe: Path
) -> None:
    process = begin(*TORCHRUN, "-m", "lmkit", "train", str(recipe))
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
