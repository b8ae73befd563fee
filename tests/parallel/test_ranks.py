"""The environment that describes a rank, the rendezvous, and the end of a rank."""

import os
import socket
import subprocess
import sys

import pytest
import torch.distributed as dist
from raising import raises

from lmkit.errors import LmkitError, UsageError
from lmkit.parallel.ranks import RENDEZVOUS_VARIABLE, hosted_store, process_group


def test_a_single_process_needs_no_group(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    before = dict(os.environ)
    with process_group("cpu") as ranks:
        assert (ranks.rank, ranks.world_size, ranks.is_first) == (0, 1, True)
        assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("environment", "names"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["MASTER_ADDR", "MASTER_PORT"]),
        ({"WORLD_SIZE": "2"}, ["RANK", "MASTER_ADDR", "MASTER_PORT"]),
        (
            {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            ["RANK=2", "WORLD_SIZE=2"],
        ),
        ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, ["RANK='x'"]),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "70000"}, ["MASTER_PORT=70000"]),
    ],
)
def test_half_an_environment_is_refused(monkeypatch, environment, names):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
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
    with hosted_store() as address:
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", RENDEZVOUS_VARIABLE: address}.items():
            monkeypatch.setenv(name, value)
        with (
            raises(LmkitError, "parallel.rank_absent", "rank 0", "rank 1", "1 s"),
            process_group("cpu", timeout_s=1),
        ):
            raise AssertionError("unreachable")


def test_only_this_machine_reaches_the_rendezvous():
    with hosted_store() as address, socket.socket() as other:
        host, _, port = address.rpartition(":")
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

def work():
    begin.wait()
    print("thread finished")

threading.Thread(target=work).start()
atexit.register(print, "exit handler")
begin.set()
print("said", end="")
print("said too", end="", file=sys.stderr)
shutdown(7)
"""


def test_threads_end_handlers_run_streams_are_flushed_and_nothing_is_torn_down():
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=240)
    assert ended.returncode == 7
    assert ended.stderr == "said too"
    assert "said" in ended.stdout
    assert "thread finished" in ended.stdout
    assert ended.stdout.endswith("exit handler\n")
    assert "torn down" not in ended.stdout
