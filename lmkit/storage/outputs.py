"""Refuse output paths that exist or cannot be written, before time is spent on their content."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from lmkit.errors import UsageError, reason


def refuse_existing(output: Path, *, force: bool) -> None:
    """Refuse an output that exists, unless `force`.

    Raises:
        UsageError: the output exists ("output.exists"), or is a folder or another thing that is not a file
            ("output.not_a_file").
    """
    if output.is_dir():
        raise UsageError("output.not_a_file", f"{output}: is a folder", hint="name a file")
    if output.exists() and not output.is_file():
        raise UsageError("output.not_a_file", f"{output}: is not a regular file", hint="name another file")
    if output.exists() and not force:
        raise UsageError(
            "output.exists",
            f"{output}: exists already",
            hint="choose another name, or replace it with --force",
        )


def refuse_replacing(outputs: Iterable[Path], sources: Iterable[Path]) -> None:
    """Refuse outputs that would replace a source, also through a link and with --force.

    Raises:
        UsageError: names the source ("output.replaces_source").
    """
    written = {os.path.realpath(path): path for path in outputs}
    for source in sources:
        output = written.get(os.path.realpath(source))
        if output is not None:
            raise UsageError(
                "output.replaces_source",
                f"{source}: {output.name} would replace this source",
                hint="give the output another name",
            )


def refuse_unwritable(folder: Path, *, option: str = "--output") -> None:
    """Refuse a folder that cannot be created or written to, before time is spent on its content.

    Tries to write a temporary file to the folder, or to the nearest parent that exists.

    Args:
        option: names the option that chooses another folder, for the hint.

    Raises:
        UsageError: names the obstacle ("output.unwritable").
    """
    place = folder
    try:
        while not place.exists():
            place = place.absolute().parent
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        raise UsageError(
            "output.unwritable",
            f"{folder}: cannot write there: {place}: {reason(error)}",
            hint=f"choose another folder with {option}",
        ) from None
