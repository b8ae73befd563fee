"""Read JSON lines, or one array of JSON objects, and name the line of every mistake."""

from __future__ import annotations

import gzip
import io
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from lmkit.errors import LmkitError
from lmkit.storage.json_files import parse_json
from lmkit.tokenizer.chunks import REPLACE, Chunk, ErrorMode, valid_utf8

_LONGEST_LINE = 1 << 28  # bytes of one JSON document: a small compressed file may hold a line without end
_HALF = re.compile("[\ud800-\udfff]")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_HINT = "every line must hold one JSON object"


def holds_json(path: Path) -> bool:
    """Return whether the name of a file says that it holds JSON objects, a document each."""
    return path.name.lower().removesuffix(".gz").endswith((".jsonl", ".ndjson", ".json"))


def json_records(
    stream: IO[bytes] | gzip.GzipFile, path: Path, errors: ErrorMode = "strict"
) -> Iterator[tuple[str, Any]]:
    """Yield the place, for errors, and the content of every line that is not blank; of a file that holds one JSON
    array, of every item.

    Raises:
        LmkitError: a line is too long, not JSON or not UTF-8. Half a surrogate pair (`\\ud800`) is valid JSON and no
            UTF-8; it is an error or becomes U+FFFD, as `errors` says.
    """
    if path.name.lower().removesuffix(".gz").endswith(".json"):
        data = stream.read(_LONGEST_LINE + 1)
        if len(data) > _LONGEST_LINE:
            message = f"{path}: larger than {_LONGEST_LINE:,} bytes"
            raise LmkitError("corpus.long_line", message, hint="write JSON lines, and name the file .jsonl")
        text = valid_utf8(Chunk(0, 0, len(data), data), path, errors).decode()
        whole = None
        with suppress(ValueError):
            whole = parse_json(text)
        if whole is not None:
            for number, record in enumerate(whole if isinstance(whole, list) else [whole], 1):
                where = f"{path}, item {number}"
                yield where, _without_halves(record, where, errors) if _SURROGATE.search(text) else record
            return
        stream = io.BytesIO(data)  # JSON lines
    read = number = 0
    while line := stream.readline(_LONGEST_LINE + 1):
        number += 1
        where = f"{path}, line {number}"
        if len(line) > _LONGEST_LINE:
            raise LmkitError("corpus.long_line", f"{where}: longer than {_LONGEST_LINE:,} bytes", hint=_HINT)
        text = valid_utf8(Chunk(0, read, len(line), line), path, errors).decode()
        read += len(line)
        if not text.strip():
            continue
        try:
            record = parse_json(text)
        except ValueError as error:
            raise LmkitError("corpus.not_json", f"{where}: {error}", hint=_HINT) from None
        yield where, _without_halves(record, where, errors) if _SURROGATE.search(text) else record


def _without_halves(record: Any, where: str, errors: ErrorMode) -> Any:
    """Return the content of a line with U+FFFD in place of surrogates that are in no pair.

    Raises:
        LmkitError: there are such, and `errors` is "strict".
    """
    text = json.dumps(record, ensure_ascii=False)
    half = _HALF.search(text)
    if half is None:
        return record
    if errors == "strict":
        raise LmkitError(
            "text.not_utf8", f"{where}: \\u{ord(half[0]):x} without its other half", hint=REPLACE
        )
    return json.loads(_HALF.sub("\ufffd", text))
