"""What commands write: explicit outputs are never overwritten by accident, and what was written is said."""

from __future__ import annotations

import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path

from lmkit.errors import UsageError, reason
from lmkit.measure.tables import TERMINAL_WIDTH


def refuse_existing(output: Path, *, force: bool) -> None:
    """Refuse an output that exists, unless `force`.

    Raises:
        UsageError: the output exists, or is a folder where a file is wanted.
    """
    if output.is_dir():
        raise UsageError(f"{output}: is a folder", hint="name a file")
    if output.exists() and not output.is_file():
        raise UsageError(f"{output}: is not a regular file", hint="name another file")
    if output.exists() and not force:
        raise UsageError(f"{output}: exists already", hint="choose another name, or replace it with --force")


def refuse_unwritable(folder: Path, *, option: str = "--output") -> None:
    """Refuse a folder that could not be made or written to, before time is spent on what it is for.

    Leaves nothing behind: a trial file lives and dies in the folder, or in the nearest above it that exists.

    Args:
        option: by which another folder is chosen, for the hint.

    Raises:
        UsageError: names what is in the way.
    """
    place = folder
    try:
        while not place.exists():
            place = place.absolute().parent
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        raise UsageError(
            f"{folder}: cannot write there: {place}: {reason(error)}",
            hint=f"choose another folder with {option}",
        ) from None


def wrote(folder: str, files: Sequence[str]) -> str:
    """`wrote FOLDER: a, b, ...` in lines that fit a terminal; no name is broken."""
    return enumeration(f"wrote {folder}", files)


def enumeration(what: str, items: Sequence[str]) -> str:
    """`what: a, b, ...` in lines that fit a terminal, broken between words."""
    text = ", ".join(items)
    head = f"{what}: "
    first_line = "" if len(head + text.partition(" ")[0]) <= TERMINAL_WIDTH else f"{what}:\n"
    return first_line + textwrap.fill(
        text,
        TERMINAL_WIDTH,
        initial_indent="  " if first_line else head,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def statement(what: str, facts: str) -> str:
    """`what: facts`; the facts in a line of their own where a terminal is too narrow for both."""
    line = f"{what}: {facts}"
    return line if len(line) <= TERMINAL_WIDTH else f"{what}:\n  {facts}"
