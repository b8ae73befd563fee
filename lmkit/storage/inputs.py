"""Open the files that users name, or that lie in their folders: nothing but a regular file is read.

Opening a named pipe waits until somebody writes to it, perhaps forever. A text may come from one, because reading it
is what its user asks for; nothing else may. What the shell hands over (`/dev/stdin`, `<(command)`) has a writer.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

_HANDED_OVER = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")
_MOST_BYTES = 1 << 26  # of a JSON file


def in_home(path: Path) -> Path:
    """Return a path with the home folder in place of `~` at its beginning; `~name` is an ordinary name."""
    return path.expanduser() if path.parts[:1] == ("~",) else path


def files_of(path: Path) -> list[Path]:
    """Return the files that a glob names, sorted by name; the path itself if it is no glob, or is a file's name."""
    if not glob.has_magic(str(path)) or os.path.lexists(path):
        return [path]
    return [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if not os.path.isdir(name)]


def open_input(path: str | os.PathLike[str], *, pipes: bool = False) -> BufferedReader:
    """Open a regular file to read its bytes. Errors are those of `open`; PermissionError: it is none.

    pipes: it may be a named pipe, too: only a text that is read once from its beginning to its end.
    """
    mode = os.stat(path).st_mode
    # `open` refuses folders.
    is_taken = stat.S_ISREG(mode) or stat.S_ISDIR(mode) or (pipes and stat.S_ISFIFO(mode))
    if not is_taken and not os.path.abspath(path).startswith(_HANDED_OVER):
        raise PermissionError(errno.EPERM, "is not a regular file", str(path))
    return open(path, "rb")


def read_input(path: str | os.PathLike[str], *, pipes: bool = False) -> bytes:
    """Return the content of a file; see `open_input`."""
    with open_input(path, pipes=pipes) as file:
        return file.read()


def read_object(path: Path, *, most_bytes: int = _MOST_BYTES) -> dict[str, Any]:
    """Return the JSON object that a file holds; ValueError says in a few words what is wrong with its content."""
    with open_input(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"larger than {most_bytes:,} bytes")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    return parse_json(text, dict)


def parse_json(text: str, kind: type = object) -> Any:
    """Return what a text holds as JSON (kind: dict for an object); ValueError says in a few words what is wrong."""
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    except ValueError:  # Python refuses to read thousands of digits
        raise ValueError("a number has too many digits") from None
    if not isinstance(content, kind):
        raise ValueError("not a JSON object")
    return content
