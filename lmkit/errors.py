"""Errors that a user can cause: a code, one line that names the file and the key, one line of hint, an exit code.

Code deep inside the library raises these (or `ValueError` in the public Python API); the command line
turns them into text. Anything else that escapes is a defect of ours and keeps its traceback.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

LONGEST = 2000
"""Characters of a message: a damaged file may hold a name of a megabyte."""


class LmkitError(Exception):
    """Something failed while running (exit code 1).

    Args:
        code: `area.mistake`, such as "recipe.unknown_key": what programs and tests tell errors apart by.
        message: one line; names the file and the key, flag or offset.
        hint: one line; what to do about it.
    """

    exit_code = 1
    is_consequence = False
    """Whether an error of another process explains this one and should be read instead."""

    def __init__(self, code: str, message: str | None = None, *, hint: str = "") -> None:
        if message is None:  # raised by code that does not give codes yet
            code, message = "error", code
        self.code = code
        # A file name or a key may hold line breaks or escape codes: they are shown, not obeyed.
        self.message = _printable(message)
        self.hint = _printable(hint)
        super().__init__(self.message)

    def __reduce__(self) -> tuple:
        # Errors cross process borders (workers, ranks); the keyword argument must survive pickling.
        return (_rebuild, (type(self), self.code, self.message, self.hint))


class UsageError(LmkitError):
    """Wrong use or a wrong recipe (exit code 2): nothing was started."""

    exit_code = 2


def reason(error: OSError) -> str:
    """What the operating system says, as the rest of a line: `no such file or directory`."""
    return (error.strerror or str(error)).lower()


def out_of_memory(error: BaseException) -> LmkitError | None:
    """The error for people where memory ran out, on the host or on a GPU; None where something else happened."""
    text = str(error)
    if not isinstance(error, MemoryError) and not (
        "out of memory" in text or "can't allocate memory" in text
    ):
        return None
    parts = re.split(r"\. |: |\n", text)
    detail = next((part.strip() for part in parts if re.search(r"allocate.*\d", part)), "")
    detail = re.sub(r"\b(\d{8,}) bytes", lambda size: f"{int(size[1]) / 2**30:,.1f} GiB", detail)
    return LmkitError(
        "memory.exhausted",
        f"out of memory{': ' + detail if detail else ''}",
        hint="give it more memory, or less to do at once: a smaller batch, context or model, fewer workers",
    )


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean ...?)` for the nearest known name, or nothing."""
    import difflib

    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]}?)" if near else ""


def _printable(text: str) -> str:
    shown = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text[:LONGEST])
    return shown if len(text) <= LONGEST else shown + "..."


def _rebuild(kind: type[LmkitError], code: str, message: str, hint: str) -> LmkitError:
    return kind(code, message, hint=hint)
