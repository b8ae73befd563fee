"""Ranks under the real launchers: one is killed, one hangs."""

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
from sessions import PATIENCE_S, members, start, wait_for_all
from tiny import RANDOM_TOKENS, tiny_recipe

from lmkit.recipe.run_folder import METRICS
from lmkit.training.checkpoint import newest_valid
from lmkit.training.metrics import read_metrics

Begin = Callable[..., "subprocess.Popen[str]"]

RECIPE = tiny_recipe(
    *RANDOM_TOKENS,
    *("train.steps=1000000", "train.batch_size=8", "train.log_interval=1"),
    *("checkpoint.interval=50", 'parallel.strategy="zero1"'),
)


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
        given = "--nnodes 2 --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d --rdzv-id two"
        given += f" --rdzv-endpoint 127.0.0.1:{self._port} --local-addr 127.0.0.1 --rdzv-conf {conf}"
        with open(self._folder / f"{name}.log", "wb") as log:
            self._agents[name] = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *given.split(), *self._command],
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
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    )
    return [int(line) for line in found.stdout.split()]


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
        assert "rank 1" in machines.wait_for(r"error\[parallel.rank_lost\]: rank 0, (?:after )?step (.*?)\n")
        machines.start("third")
        step = int(machines.wait_for(r"resuming from \S*step-0*(\d+)\n"))
        assert step >= 50
        last = int(machines.wait_for(r"resuming from .*?\nstep (\d+)/"))
        assert last > step
    whole = [*chosen, "--set", "run.name=whole", "--nproc", "2", "--stop-at-step", str(last)]
    assert lmkit("train", recipe, *whole).returncode == 0
    resumed, uninterrupted = (
        [each["loss"] for each in read_metrics(tmp_path / "runs" / name / METRICS) if each["kind"] == "train"]
        for name in ("run", "whole")
    )
    assert resumed[:last] == uninterrupted
    assert len(uninterrupted) == last
    choice = newest_valid(recipe.parent / "runs" / "run" / "checkpoints")
    assert choice.skipped == ()
