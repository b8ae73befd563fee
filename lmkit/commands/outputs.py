"""Explicit outputs are never overwritten by accident."""

from __future__ import annotations

from pathlib import Path

from lmkit.errors import UsageError


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
