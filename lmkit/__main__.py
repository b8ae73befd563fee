"""Run the command line: `lmkit`, `python -m lmkit`, `torchrun -m lmkit`, `torchrun lmkit`."""

import os
import signal
import sys
from types import FrameType

# `torchrun lmkit` runs `python lmkit`, which puts the package folder first on sys.path. There our folders would
# shadow top-level modules of the same name: put its parent there instead.
_PACKAGE_FOLDER = os.path.dirname(os.path.abspath(__file__))
if sys.path and os.path.abspath(sys.path[0] or os.curdir) == _PACKAGE_FOLDER:
    sys.path[0] = os.path.dirname(_PACKAGE_FOLDER)

_INTERRUPTED = 130


def _exit_interrupted() -> None:
    """Say that SIGINT came, and exit at once, without cleaning up."""
    try:
        if os.environ.get("RANK", "0") == "0":
            os.write(2, b"interrupted\n")
    finally:  # stderr may be closed
        os._exit(_INTERRUPTED)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt for SIGINT, SystemExit for others, so that partial files are removed.

    While torch is imported, exit at once: parts of torch swallow the exception.
    """
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if frame.f_code.co_name == "<module>" and package == "torch":
            if number != signal.SIGINT:
                os._exit(128 + number)
            _exit_interrupted()
        frame = frame.f_back
    if number != signal.SIGINT:
        raise SystemExit(128 + number)
    raise KeyboardInterrupt


def main() -> None:
    """Run the command line and exit with its code."""
    # After its import, threads of numpy's OpenBLAS spin for a tenth of a second on cores that the tokenizer's threads
    # need. Set before numpy is imported, this lets them sleep after 2**4 ticks of the clock.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
    try:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else the caller wants it ignored
            signal.signal(signal.SIGINT, _interrupt)
        for number in (signal.SIGTERM, signal.SIGHUP):
            # torchrun ends its ranks itself.
            if "RANK" not in os.environ and signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _interrupt)
        from lmkit.streams import secure_streams

        secure_streams()
        from lmkit.cli.app import run_command_line

        code = run_command_line(sys.argv[1:])
        # The work is done. A signal from now on ends the process without a traceback.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is _interrupt:
                signal.signal(number, signal.SIG_DFL)
    except KeyboardInterrupt:  # before or after the command: `run_command_line` handles those in it
        _exit_interrupted()
    if code == _INTERRUPTED:
        # An exception that left exec(), with which Python makes dataclasses, lets the process end by SIGINT instead
        # of with our code. The next exec() takes that back.
        exec("")
    if "lmkit.parallel.ranks" in sys.modules and "RANK" in os.environ:
        from lmkit.parallel.ranks import shutdown

        shutdown(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
