"""The environment that describes a rank, the rendezvous, the end of a rank, and what is said when one is lost."""

import os
import socket
import subprocess
import sys

import pytest
import torch.distributed as dist
from raising import raises

from lmkit.errors import LmkitError, UsageError
from lmkit.parallel import launch
from lmkit.parallel.ranks import ROLL_CALL_S, RankLost, Ranks, hosted_store, losses_named, process_group


def test_a_single_process_needs_no_group(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    before = dict(os.environ)
    with process_group("cpu") as ranks:
        assert (ranks.rank, ranks.world_size, ranks.is_first) == (0, 1, True)
        assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"MASTER_ADDR": None, "MASTER_PORT": None}, ["MASTER_ADDR", "MASTER_PORT"]),
        ({"RANK": "2"}, ["RANK=2", "WORLD_SIZE=2"]),
        ({"RANK": "x"}, ["RANK=x"]),
        ({"MASTER_PORT": "70000"}, ["MASTER_PORT=70000"]),
    ],
)
def test_half_an_environment_is_refused(monkeypatch, changes, names):
    whole = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1", "LOCAL_RANK": None}
    for name, value in (whole | changes).items():
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    with raises(UsageError, "parallel.environment", *names, hint="torchrun"), process_group("cpu"):
        raise AssertionError("unreachable")


def test_a_taken_port_is_an_error_with_a_hint(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        settings = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        for name, value in {**settings, "MASTER_PORT": str(taken.getsockname()[1])}.items():
            monkeypatch.setenv(name, value)
        port = os.environ["MASTER_PORT"]
        with raises(LmkitError, "parallel.port_taken", f"127.0.0.1:{port}"), process_group("cpu"):
            raise AssertionError("unreachable")


def test_a_rank_that_never_comes_is_named(monkeypatch):
    with hosted_store() as environment:
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", **environment}.items():
            monkeypatch.setenv(name, value)
        said = ("rank 0", "rank 1", "1 s")
        with raises(LmkitError, "parallel.rank_absent", *said), process_group("cpu", timeout_s=1):
            raise AssertionError("unreachable")


def test_only_this_machine_reaches_the_rendezvous():
    with hosted_store() as environment, socket.socket() as other:
        host, port = environment["MASTER_ADDR"], environment["MASTER_PORT"]
        assert host == "127.0.0.1"
        store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
        store.set("key", "value")
        other.bind(("127.0.0.2", int(port)))  # the same port of another address is free


SCRIPT = """
import atexit, sys, threading
from lmkit.parallel.ranks import shutdown

class Torn:
    def __del__(self):
        print("torn down")

kept = Torn()  # a global: only the interpreter's teardown would take it
begin = threading.Event()
threading.Thread(target=lambda: begin.wait() and print("thread finished")).start()
atexit.register(print, "exit handler")
begin.set()
print("said too", end="", file=sys.stderr)
shutdown(7)
"""


def test_threads_end_handlers_run_streams_are_flushed_and_nothing_is_torn_down():
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=240)
    assert (ended.returncode, ended.stderr) == (7, "said too")
    assert ended.stdout == "thread finished\nexit handler\n"


def test_fault_72_the_waits_after_a_death_are_far_below_the_30_seconds_that_are_promised():
    """The roll call of the survivors, their time to report, and to end after SIGTERM."""
    assert ROLL_CALL_S + 2 * launch.GRACE_S < 15


@pytest.mark.parametrize(
    ("error", "what"),
    [
        ("[gloo/transport/tcp/pair.cc:534] Connection closed by peer", "connection"),
        ("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 7000ms", "7 s"),
        ("Application timeout caused pair closure", "7 s"),
    ],
)
@pytest.mark.parametrize(
    ("survivors", "who"), [((), "rank 1, 2"), ((2,), "rank 1 "), ((1, 2), "all ranks"), (None, "store")]
)
def test_fault_72_and_73_survivors_say_what_they_know(monkeypatch, error, what, survivors, who):
    """And not that a silent rank is lost: it may not have noticed yet."""
    monkeypatch.setattr("lmkit.parallel.ranks.ROLL_CALL_S", 0.1)
    store = GoneStore() if survivors is None else dist.HashStore()
    for rank in survivors or ():
        store.set(f"survivor/{rank}", "yes")
    ranks = Ranks(rank=0, world_size=3, timeout_s=7.0, store=store)
    with raises(RankLost, "parallel.rank_lost", "rank 0, step 5", what, who), losses_named(ranks, "step 5"):
        raise RuntimeError(error)


class GoneStore:
    def set(self, key, value):
        raise dist.DistNetworkError("Broken pipe")


HANGING = """
import threading, torch
from lmkit.parallel.ranks import Ranks, step_watch

with step_watch(Ranks(rank=3, world_size=4, device=torch.device("cuda", 3), timeout_s=0.5)) as watch:
    for step in range(3):
        with watch(step):
            pass
    threading.Event().wait(0.8)  # between steps nothing is awaited
    print("idle", flush=True)
    with watch(7):
        threading.Event().wait()
"""


def test_fault_73_on_gpus_a_clock_ends_a_rank_whose_step_hangs():
    """No exception reaches a thread that waits for a GPU; the clock needs none to be tested."""
    done = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "idle\n")
    assert done.stderr.startswith("error[parallel.step_hangs]: rank 3, step 7: ")
    assert done.stderr.count("\n") == 1
