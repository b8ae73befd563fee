"""A rank's end: what Python promises at exit happens, the teardown that can abort gloo's threads does not."""

from __future__ import annotations

import subprocess
import sys

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


def test_threads_end_handlers_run_streams_are_flushed_and_nothing_is_torn_down() -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=240)
    assert ended.returncode == 7
    assert ended.stderr == "said too"
    assert "said" in ended.stdout
    assert "thread finished" in ended.stdout
    assert ended.stdout.endswith("exit handler\n")
    assert "torn down" not in ended.stdout
