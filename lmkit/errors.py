"""Errors that a user can cause: a code, one line that names the file and the key, one line of hint, an exit code.

Library code raises these (or `ValueError` in the public Python API), and the command line prints them. Any other
exception is a defect of lmkit and keeps its traceback.
"""

from __future__ import annotations

import errno
import functools
import re
import resource  # at once: where memory has run out, nothing can be imported any more
from collections.abc import Collection, Iterable
from contextlib import suppress

PARTIAL_SUFFIX = ".lmkit-partial"
"""Ends the name of a file or folder that lmkit is writing; see `lmkit.storage.atomic`."""
LONGEST = 2000
"""Longest message in characters: a damaged file may hold a name of a megabyte."""


class LmkitError(Exception):
    """Something failed while running (exit code 1).

    Args:
        code: `area.mistake`, such as "recipe.unknown_key", for programs and tests.
        message: one line; names the file and the key, flag or offset.
        hint: one line; what the user can do.
    """

    exit_code = 1
    is_consequence = False
    """Whether an error of another process caused this one and should be read instead."""

    def __init__(self, code: str, message: str, *, hint: str = "") -> None:
        self.code = code
        # A file name or a key may hold line breaks or escape codes: show them escaped.
        self.message = _printable(message)
        self.hint = _printable(hint)
        super().__init__(self.message)

    def __reduce__(self) -> tuple:
        # Errors cross process borders (workers, ranks); the keyword argument must survive pickling.
        return functools.partial(type(self), hint=self.hint), (self.code, self.message)


class UsageError(LmkitError):
    """Wrong use or a wrong recipe (exit code 2): nothing was started."""

    exit_code = 2


def first_line(error: BaseException) -> str:
    """Return the kind of an error and the first line of its message: `KeyError: 'no such key'`."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def reason(error: Exception) -> str:
    """Return the words of an error; of the operating system's in lower case: `no such file or directory`."""
    return (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)


def limit_reached(error: BaseException) -> LmkitError | None:
    """Return an LmkitError if memory (of the host or a GPU) or open files ran out; None for other errors."""
    text = str(error)
    if getattr(error, "errno", None) == errno.EMFILE or "Too many open files" in text:
        limit = _limit("RLIMIT_NOFILE")
        hint = f"raise the limit with ulimit -n, which is {limit} here; every rank needs some"
        return LmkitError("files.too_many_open", "too many open files", hint=hint)
    # A thread needs room for its stack; a segment is of a library that is being loaded.
    signs = ("out of memory", "can't allocate memory", "can't start new thread", "failed to map segment")
    if not isinstance(error, MemoryError) and not any(sign in text for sign in signs):
        return None
    detail = ""
    if found := re.search(r"allocate ([\d.]+) ?(\w+)|failed to map segment.*", text):
        detail = f": {found[0]}"
        if found[2] == "bytes":
            detail = f": allocate {int(found[1]) / 2**30:,.1f} GiB"
    hint = "use a smaller batch, context or model (lmkit plan RECIPE says what fits), or fewer workers"
    if (limit := _limit("RLIMIT_AS")) is not None:
        hint = f"raise the limit with ulimit -v, which is {limit // 1024} kB here, or {hint}"
    return LmkitError("memory.exhausted", f"out of memory{detail}", hint=hint)


def system_error(error: BaseException) -> LmkitError | None:
    """Return the error for users of what the operating system refused; None for other errors."""
    if isinstance(error, OSError | MemoryError | RuntimeError | ImportError) and (
        found := limit_reached(error)
    ):
        return found
    if not isinstance(error, OSError):
        return None
    # Files are written under a partial name first, which the user did not give.
    where = f"{str(error.filename).removesuffix(PARTIAL_SUFFIX)}: " if error.filename else ""
    hint = "check the path, its permissions and the disk"
    return LmkitError("file.failed", f"{where}{reason(error)}", hint=hint)


def _limit(name: str) -> int | None:
    """Return a limit that the shell sets with `ulimit`; None if there is none."""
    limit = resource.getrlimit(getattr(resource, name))[0]
    return None if limit == resource.RLIM_INFINITY else limit


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean ...?)` with the nearest known name, or an empty string."""
    import difflib

    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]}?)" if near else ""


def some_of(items: Collection[object], *, most: int = 3, separator: str = ", ") -> str:
    """Return the first few items: `a, b, c and 4 more`."""
    shown = separator.join(map(str, list(items)[:most]))
    return shown if len(items) <= most else f"{shown} and {len(items) - most:,} more"


def _printable(text: str) -> str:
    # In a locale without UTF-8, Python reads an argument as bytes, each of them a surrogate.
    with suppress(UnicodeEncodeError):
        text = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    shown = text[:LONGEST]
    if not shown.isprintable():
        shown = "".join(char if char.isprintable() else repr(char)[1:-1] for char in shown)
    return shown if len(text) <= LONGEST else shown + "..."
