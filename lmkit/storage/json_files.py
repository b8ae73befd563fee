"""Read JSON that anybody may have written or damaged: whatever it holds ends in an object or in one kind of error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lmkit.storage.inputs import open_input

_MOST_BYTES = 1 << 26


def read_object(path: Path, *, most_bytes: int = _MOST_BYTES) -> dict[str, Any]:
    """Return the JSON object that a file holds.

    Raises:
        OSError: the file cannot be read.
        ValueError: says in a few words what is wrong with its content.
    """
    with open_input(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"larger than {most_bytes:,} bytes")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    return parse_object(text)


def parse_object(text: str) -> dict[str, Any]:
    """Return the JSON object that a text holds.

    Raises:
        ValueError: says in a few words what is wrong with the text.
    """
    content = parse_json(text)
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    return content


def parse_json(text: str) -> Any:
    """Return what a text holds as JSON. ValueError: as `parse_object`."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    except ValueError:  # Python refuses to read thousands of digits
        raise ValueError("a number has too many digits") from None
