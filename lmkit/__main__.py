"""Entry points: `lmkit`, `python -m lmkit`, `torchrun -m lmkit`, and the literal `torchrun lmkit ...`."""

import os
import sys

# `python lmkit` (which is what `torchrun lmkit` runs) puts the package folder itself first on sys.path, where our
# folders would shadow top-level modules of the same name. Its parent is what belongs there.
_PACKAGE_FOLDER = os.path.dirname(os.path.abspath(__file__))
if sys.path and os.path.abspath(sys.path[0] or os.curdir) == _PACKAGE_FOLDER:
    sys.path[0] = os.path.dirname(_PACKAGE_FOLDER)

import io  # noqa: E402
import signal  # noqa: E402
from types import FrameType  # noqa: E402


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Ctrl-C: a KeyboardInterrupt. While torch is being imported, which takes seconds, the process exits at once:
    parts of torch swallow the exception."""
    while frame is not None:
        if (
            frame.f_code.co_name == "<module>"
            and frame.f_globals.get("__name__", "").partition(".")[0] == "torch"
        ):
            os._exit(128 + number)
        frame = frame.f_back
    raise KeyboardInterrupt


def main() -> None:
    """Run the command line and exit with its code."""
    # The threads of numpy's OpenBLAS wait for work by spinning, a tenth of a second from the import on, on a core
    # that the tokenizer's threads need. Set before numpy is imported: after 2**4 ticks of the clock they sleep.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
    if (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):  # else whoever started it wants it ignored
        signal.signal(signal.SIGINT, _interrupt)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a closed one is None
            # What the stream's encoding lacks (in the C locale all but ASCII) is shown as \xe9: better than no text.
            stream.reconfigure(errors="backslashreplace")
    try:
        from lmkit.cli.app import run_command_line

        code = run_command_line(sys.argv[1:])
    except KeyboardInterrupt:  # before or after the command itself, for which `run_command_line` has a code
        code = 128 + signal.SIGINT
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read it has left; at its end Python would flush again, and complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = code or 1
    if "lmkit.parallel.ranks" in sys.modules and "RANK" in os.environ:
        from lmkit.parallel.ranks import shutdown

        shutdown(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
