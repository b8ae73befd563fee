"""Print results on stdout: text, or exactly one JSON object."""

from __future__ import annotations

import os
import sys
from typing import Any

_CONTROLS = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)], "\N{REPLACEMENT CHARACTER}") | {
    ord(harmless): harmless for harmless in "\t\n\r"
}


def show(result: Any, *, as_json: bool) -> None:
    """Print a command's result object: `str(result)`, or its fields as JSON."""
    if as_json:
        import dataclasses
        import json

        write(json.dumps(_plain(dataclasses.asdict(result)), allow_nan=False) + "\n")
    else:
        text = str(result)
        write(text if text.endswith("\n") else text + "\n")


def write(text: str) -> None:
    """Write text to stdout at once.

    A terminal gets U+FFFD for control characters: an untrained model writes them by chance, and a foreign checkpoint
    may do so on purpose.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK") != "0":
        return  # under torchrun, rank 0 prints
    sys.stdout.write(text.translate(_CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold: paths become strings, numbers that are not finite null."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value - value != 0:
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
