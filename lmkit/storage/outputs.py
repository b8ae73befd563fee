"""Refuse output paths that exist or cannot be written, before time is spent on their content."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from lmkit.errors import UsageError, reason


def refuse_existing(output: Path, *, force: bool, such_as: str = "NAME") -> None:
    """Refuse an output that exists, unless `force` ("output.exists"), that is not a file ("output.not_a_file": the
    hint names `such_as` in a folder), or that cannot be written ("output.unwritable")."""
    if output.is_dir():
        hint = f"name a file: {output / such_as}"
        raise UsageError("output.not_a_file", f"{output}: is a folder", hint=hint)
    if output.exists() and not output.is_file():
        raise UsageError("output.not_a_file", f"{output}: is not a regular file", hint="name another file")
    if os.path.lexists(output) and not force:  # a link to nothing, too
        hint = "choose another name, or replace it with --force"
        raise UsageError("output.exists", f"{output}: exists already", hint=hint)
    refuse_unwritable(output.parent, option="")


def refuse_replacing(outputs: Iterable[Path], sources: Iterable[Path]) -> None:
    """Refuse outputs that would replace a source, also through a link and with --force ("output.replaces_source")."""
    written = list(outputs)
    places = list(map(os.path.realpath, written))
    for source in sources:
        if (place := os.path.realpath(source)) in places:
            message = f"{source}: {written[places.index(place)].name} would replace this source"
            raise UsageError("output.replaces_source", message, hint="give the output another name")


def refuse_unwritable(folder: Path, *, option: str = "--output") -> None:
    """Refuse a folder that cannot be created or written to ("output.unwritable").

    Tries to write a temporary file to the folder, or to the nearest parent that exists. `option` chooses another
    folder, for the hint; "" if it is no option.
    """
    place = folder
    try:
        place = _nearest(folder)
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        message = f"{folder}: cannot write there: {place}: {reason(error)}"
        hint = "choose another folder" + (option and f": {option}")
        raise UsageError("output.unwritable", message, hint=hint) from None


def refuse_too_large(output: Path, num_bytes: float) -> None:
    """Refuse an output that is larger than what is free on its disk ("output.too_large")."""
    free = shutil.disk_usage(_nearest(output.parent)).free
    if num_bytes > free:
        sizes = f"{num_bytes / 1e9:,.4g} GB would be written, and {free / 1e9:,.4g} GB are free there"
        hint = "choose a smaller size, or another disk"
        raise UsageError("output.too_large", f"{output}: {sizes}", hint=hint)


def _nearest(path: Path) -> Path:
    """Return a path or the nearest of its parents that exists, if only as a link that leads nowhere."""
    while not os.path.lexists(path):
        path = path.absolute().parent
    return path
