"""How a rank ends: everything that Python promises to do at exit, but not the teardown of the interpreter."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End this process with an exit code.

    Gloo's worker threads still own the tensors of the last collectives when `destroy_process_group` has returned,
    and need the interpreter to release them. In the teardown, Python before 3.14 ends such a thread inside C++
    code, which aborts the process ("terminate called without an active exception") although its work is done.
    So what a normal exit does first is done here (other threads end, exit handlers run, streams are flushed), and
    the rest is left to the operating system.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
