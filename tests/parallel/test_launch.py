"""Starting ranks, and what happens when one of them fails: always an end, always a name."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import rank_faults
from raising import raises

from lmkit import plugins
from lmkit.errors import LmkitError, UsageError
from lmkit.parallel import launch
from lmkit.parallel.launch import RankFailed, spawn_ranks
from lmkit.parallel.ranks import RankLost, Ranks
from lmkit.parallel.strategy import build_strategy
from lmkit.recipe.tables import ParallelConfig

# Only to end a test that hangs: how long ranks take to start depends on the machine.
PATIENCE_S = 240.0
PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "strategy", "code", "kind", "names"),
    [
        ("kill", "zero1", "parallel.rank_failed", RankFailed, ("rank 1", "SIGKILL")),
        ("exception", "bucketed", "parallel.rank_failed", RankFailed, ("rank 1", "ZeroDivisionError")),
        ("error", "flat", "data.bad", LmkitError, ("rank 1", "the data is bad")),
        # Rank 1 is ended after the waits of a launcher, 9 s.
        ("hang", "bucketed", "parallel.rank_lost", RankLost, ("rank 0, step 2", "1 s", "no sign of rank 1")),
    ],
)
def test_fault_72_and_73_a_rank_that_fails_in_backward_ends_the_job(
    capfd, monkeypatch, fault, strategy, code, kind, names
):
    """A death ends the job by the broken connection: before the timeout of the ranks, pytest's would end this."""
    if fault != "hang":  # all ranks end by themselves, on a slow machine later
        monkeypatch.setattr(launch, "GRACE_S", PATIENCE_S)
    with raises(kind, code, *names):
        spawn_ranks(2, rank_faults.train_until_fault, (fault, strategy))
    written = capfd.readouterr().err
    assert ("Traceback" in written) == ("ZeroDivisionError" in written) == (fault == "exception")


def test_a_refusal_by_all_ranks_keeps_its_type_and_hint(monkeypatch):
    monkeypatch.setattr(launch, "GRACE_S", PATIENCE_S)  # rank 0 may come late
    with raises(UsageError, "recipe.unknown_key") as caught:
        spawn_ranks(2, rank_faults.refuse, ("unknown key",))
    assert caught.value.message.startswith("rank 0: recipe.toml")
    assert caught.value.hint == "correct it"


PLUGIN = """
import os

import torch
from torch import nn
from lmkit.parallel import ParallelConfig, Strategy, build_strategy, process_group
from lmkit.registry import STRATEGIES

@STRATEGIES.register("from_outside", uses=("reduce_dtype",), options={"factor": 1.0})
class FromOutside(Strategy):
    def _reduce(self, unused, *, wait):
        for parameter in self.parameters:
            self._averager.all_reduce([parameter.grad]).wait()
            parameter.grad *= self.config.options["factor"]
        return []

def train():
    with process_group("cpu") as ranks:
        assert os.environ["CUDA_SCALE_LAUNCH_QUEUES"] == "4x"
        model = nn.Linear(2, 1, bias=False)
        config = ParallelConfig(strategy="from_outside", options={"factor": 10.0})
        sync = build_strategy(config, ranks)
        sync.attach(model)(torch.full((2,), ranks.rank + 1.0)).backward()
        sync.finish()
        return model.weight.grad.tolist()
"""


@pytest.fixture
def plugin(tmp_path):
    """Load a plugin with this source in this process; return its module."""

    def load(source):
        path = tmp_path / "my_plugin.py"
        path.write_text(source)
        plugins.load_plugin(path)
        return sys.modules["lmkit_plugin_my_plugin"]

    return load


def test_ranks_load_the_plugins_of_their_parent_and_the_first_one_returns_its_result(plugin, monkeypatch):
    """Ranks ask the driver for long launch queues."""
    monkeypatch.delenv("CUDA_SCALE_LAUNCH_QUEUES", raising=False)
    module = plugin(PLUGIN)
    assert spawn_ranks(2, module.train) == [[15.0, 15.0]]
    with raises(UsageError, "parallel.wrong_option", "factor", "from_outside", "float"):
        build_strategy(ParallelConfig(strategy="from_outside", options={"factor": "much"}), Ranks())


@pytest.mark.parametrize(
    ("target", "kind", "code", "says"),
    [
        ("ends", LmkitError, "plugin.raised", "my_plugin.py:10: BaseException: first line"),
        ("leaves", RankFailed, "parallel.rank_failed", "ended before"),
        ("stops", RankFailed, "parallel.rank_failed", "exit code 143"),  # nobody asked the parent to stop
    ],
)
def test_a_rank_that_fails_is_told_in_one_line_and_one_that_just_leaves_has_failed(
    plugin, target, kind, code, says
):
    module = plugin(
        "import sys\n\n"
        "def leaves():\n    sys.exit(0)\n\ndef stops():\n    sys.exit(143)\n\n"
        "def ends():\n    raise BaseException('first line\\nsecond')\n"
    )
    with raises(kind, code, "rank 0", says):
        spawn_ranks(1, getattr(module, target))


LATE = """
import multiprocessing, signal, sys, threading, time
from lmkit.parallel.launch import spawn_ranks
from lmkit.parallel.ranks import process_group

if multiprocessing.current_process().name == "rank 1":  # the other one waits for it meanwhile
    while signal.SIGINT not in signal.sigpending():
        time.sleep(0.01)

def work():
    print("loaded", flush=True)
    with process_group("cpu"):
        threading.Event().wait()

if __name__ == "__main__":
    try:
        spawn_ranks(2, work)
    except KeyboardInterrupt:
        sys.exit(130)
"""


@pytest.mark.full
def test_ctrl_c_while_a_rank_still_loads_its_modules_ends_all(tmp_path):
    script = tmp_path / "late.py"
    script.write_text(LATE)
    with subprocess.Popen([sys.executable, script], **PIPES) as process:
        try:
            assert process.stdout.readline() == "loaded\n"  # by rank 0
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert (process.returncode, errors) == (130, "")


@pytest.mark.full
def test_a_second_signal_ends_ranks_that_do_not_leave(tmp_path):
    ready = tmp_path / "ready"

    def signal_twice():
        for told in ("pid", "told"):  # a second one that comes before is the same to the system
            for rank in range(2):
                wait_for_text(Path(f"{ready}.{told}{rank}"))
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=signal_twice, daemon=True)
    thread.start()
    with pytest.raises(SystemExit) as caught:
        spawn_ranks(2, rank_faults.stay_whatever_the_signal, (str(ready),))
    thread.join()
    assert caught.value.code == 143
    for rank in multiprocessing.active_children():  # killed, but on a busy machine not yet gone
        rank.join(PATIENCE_S)
        assert rank.exitcode == -signal.SIGKILL
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int(Path(f"{ready}.pid{rank}").read_text()), 0)


@pytest.mark.full
def test_a_rank_that_loses_one_that_was_told_to_stop_is_no_failure():
    with pytest.raises(SystemExit) as caught:
        spawn_ranks(2, rank_faults.ignore_signals_on_rank_0)
    assert caught.value.code == 143


def wait_for_text(path: Path) -> None:
    """Wait until the file has content; polls, because a file is all that the ranks can leave."""
    pause = threading.Event()
    while not (path.exists() and path.read_text()):
        pause.wait(0.01)
