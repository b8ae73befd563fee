"""Standard streams that may be lost: closed from the start, on a full disk, or with a reader that leaves.

A command goes on without its log: once stderr cannot be written, the log goes to `os.devnull`. What a command prints
on stdout is its result: if that cannot be written, the command fails.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, TextIO, cast

from lmkit.errors import LmkitError, reason

Progress = Callable[[str, int, int], None]
"""Called with the name of a stage, how much of it is done, and how much there is (bytes, steps, cases)."""
_results: list[TextIO] = []
_CONTROLS = (*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_SHOWN = dict.fromkeys(_CONTROLS, "\N{REPLACEMENT CHARACTER}") | str.maketrans("\t\n\r", "\t\n\r")
_DESCRIPTORS = {"stdout": 1, "stderr": 2}


def wants_plain_text(stream: IO[str]) -> bool:
    """Whether no escape codes may be written: not a terminal, a dumb one, or NO_COLOR is set (no-color.org)."""
    return not stream.isatty() or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


def harmless(text: str, stream: TextIO) -> str:
    """Return what a stream may show of a text: for a terminal, with U+FFFD in place of control characters.

    They drive a terminal or reverse the rest of a line. An untrained model writes them by chance; a foreign
    checkpoint, recipe or file name may have them on purpose.
    """
    return text.translate(_SHOWN) if stream.isatty() else text


def results() -> TextIO:
    """Return the stream for what a command prints as its result."""
    return _results[-1] if _results else sys.stdout


@contextmanager
def only_results_on_stdout() -> Iterator[None]:
    """Redirect stdout to stderr, except for `results()`, also for C libraries and child processes."""
    before, kept = sys.stdout, None
    before.flush()
    with suppress(OSError, ValueError):  # somebody replaced the stream by one in memory
        if before.fileno() == 1:
            kept = os.dup(1)
            os.dup2(2, 1)
    _results.append(_secured("stdout", cast(io.TextIOWrapper, before), kept) if kept is not None else before)
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        sys.stdout = before
        stream = _results.pop()
        if kept is not None:
            with suppress(OSError, LmkitError):  # the command has said so
                stream.flush()
            os.dup2(kept, 1)
            os.close(kept)


def secure_streams() -> None:
    """Open stdin, stdout and stderr where they are closed; let the loss of stdout or stderr end in no traceback.

    Call it first in a process: a file that is opened while descriptor 2 is closed would get that number, and then
    every message of a C library. Streams that somebody replaced stay.
    """
    # A closed descriptor opens read-only: writing to it still fails, and no other file gets its number.
    while (number := os.open(os.devnull, os.O_RDONLY)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    for name, number in _DESCRIPTORS.items():
        stream = getattr(sys, name)
        if stream is None or (type(stream) is io.TextIOWrapper and stream.fileno() == number):
            setattr(sys, name, _secured(name, stream))


def _secured(name: str, stream: io.TextIOWrapper | None, descriptor: int | None = None) -> io.TextIOWrapper:
    """Return a text stream on the descriptor, by default the usual one, with the settings of `stream`."""
    raw = _Descriptor(_DESCRIPTORS[name] if descriptor is None else descriptor, "w", closefd=False)
    raw.stream = name
    is_unbuffered = stream is not None and stream.write_through
    buffer: Any = raw if is_unbuffered else io.BufferedWriter(raw)
    return io.TextIOWrapper(
        buffer,
        encoding="utf-8" if stream is None else stream.encoding,
        # A character that the encoding lacks (in the C locale all but ASCII) is shown as \xe9.
        errors="backslashreplace",
        line_buffering=name == "stderr" or (stream is not None and stream.line_buffering),
        write_through=is_unbuffered,
    )


class _Descriptor(io.FileIO):
    """Descriptor 1 or 2, or a copy. After an error it leads to `os.devnull`: what is still buffered fails no more."""

    stream = "stdout"

    def write(self, data: Any, /) -> int:
        if not memoryview(data).nbytes:  # a caller tests whether this stream takes bytes
            return 0
        try:
            return super().write(data)
        except OSError as error:
            why = "it is closed" if error.errno == errno.EBADF else reason(error)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            if self.stream == "stderr":
                return memoryview(data).nbytes
            if error.errno == errno.EPIPE:  # `| head`: not an error to report
                raise
            hint = (
                "redirect it to a file, or to a program that reads to the end; files already written are kept"
            )
            raise LmkitError("output.lost", f"stdout: {why}", hint=hint) from error
