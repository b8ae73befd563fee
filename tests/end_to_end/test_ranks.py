"""Ranks under the real launchers: one is killed, one hangs, torchrun is told to stop."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from sessions import PATIENCE_S, TORCHRUN, members, start, wait_for_all
from tiny import RANDOM_TOKENS, tiny_recipe

from lmkit.recipe.run_folder import METRICS
from lmkit.training.checkpoint import newest_valid, open_checkpoint
from lmkit.training.metrics import read_metrics

Begin = Callable[..., "subprocess.Popen[str]"]

RECIPE = tiny_recipe(
    *RANDOM_TOKENS,
    *("train.steps=1000000", "train.batch_size=8", "train.log_interval=1"),
    *("checkpoint.interval=50", 'parallel.strategy="zero1"'),
)
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
def test_fault_72_a_killed_rank_ends_the_job_and_is_named(victim, begin, recipe):
    process = begin("-m", "lmkit", "train", str(recipe), "--nproc", "2")
    os.kill(members(process.pid)[f"rank {victim}"], signal.SIGKILL)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (1, "")
    assert f"rank {victim} was killed by SIGKILL" in err
    assert "Traceback" not in err
    wait_for_all(process.pid)


@pytest.mark.full
@needs_proc
def test_fault_73_a_rank_that_hangs_ends_the_job_at_the_timeout_and_is_named(begin, recipe, tmp_path):
    program = tmp_path / "impatient.py"
    program.write_text(IMPATIENT)
    process = begin(str(program), "train", str(recipe), "--nproc", "2")
    assert process.stderr is not None
    for _ in range(3):  # a collective that was under way when the first step was counted has 600 s
        process.stderr.readline()
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
def test_fault_69_under_torchrun_a_signal_saves_once_on_all_ranks(begin, lmkit, recipe):
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


class Machines:
    """torchrun's agents, each as on a machine of its own, with one rank."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._folder, self._command = folder, command
        self._agents: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *, hosts: bool = False) -> None:
        conf = f"is_host={int(hosts)},keep_alive_interval=1,keep_alive_max_attempt=2"
        options = {
            "nnodes": 2,
            "nproc-per-node": 1,
            "max-restarts": 3,
            "rdzv-backend": "c10d",
            "rdzv-id": "two",
        }
        options |= {"rdzv-endpoint": f"127.0.0.1:{self._port}", "local-addr": "127.0.0.1", "rdzv-conf": conf}
        given = [text for key, value in options.items() for text in (f"--{key}", str(value))]
        with open(self._folder / f"{name}.log", "wb") as log:
            self._agents[name] = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *given, *self._command],
                cwd=self._folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
                stdout=log,
                stderr=log,
            )

    def lose(self, name: str) -> None:
        """Kill an agent and its rank."""
        agent = self._agents.pop(name)
        for pid in [agent.pid, *children(agent.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait()

    def wait_for(self, pattern: str) -> str:
        """Return the group of the first match in what the machines have printed."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            said = "".join(path.read_text() for path in sorted(self._folder.glob("*.log")))
            if found := re.search(pattern, said, re.DOTALL):
                return found[1]
            assert time.monotonic() < deadline, said
            time.sleep(0.1)

    def close(self) -> None:
        for name in list(self._agents):
            self.lose(name)


def children(pid: int) -> list[int]:
    return [
        int(entry.name)
        for entry in Path("/proc").glob("[0-9]*")
        if (entry / "stat").exists()
        and (entry / "stat").read_text().rpartition(")")[2].split()[1] == str(pid)
    ]


@needs_proc
@pytest.mark.full
@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_a_machine_that_is_lost_and_comes_back_resumes_with_the_others(strategy, lmkit, recipe, tmp_path):
    """From the newest checkpoint, as the same run. Of torchrun, the agents of two machines."""
    chosen = ["--set", f"parallel.strategy={strategy}"]
    machines = Machines(tmp_path, ["-m", "lmkit", "train", str(recipe), *chosen])
    with closing(machines):
        machines.start("first", hosts=True)
        machines.start("second")
        machines.wait_for(r"(step \d{3,}/)")  # there is a checkpoint
        machines.lose("second")
        assert "rank 1" in machines.wait_for(r"error\[parallel.rank_lost\]: rank 0, step (.*?)\n")
        machines.start("third")
        step = int(machines.wait_for(r"resuming from \S*step-0*(\d+)\n"))
        assert step >= 50
        last = int(machines.wait_for(r"resuming from .*?\nstep (\d+)/"))
        assert last > step
    whole = [*chosen, "--set", "run.name=whole", "--nproc", "2", "--stop-at-step", str(last)]
    assert lmkit("train", recipe, *whole).returncode == 0
    resumed, uninterrupted = (
        [
            (record["step"], record["loss"])
            for record in read_metrics(tmp_path / "runs" / name / METRICS)
            if record["kind"] == "train"
        ]
        for name in ("run", "whole")
    )
    assert resumed[:last] == uninterrupted
    assert len(uninterrupted) == last
    choice = newest_valid(recipe.parent / "runs" / "run" / "checkpoints")
    assert choice.skipped == ()
