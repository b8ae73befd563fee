"""Token files: one flat array of token ids in a `.npy` file, and what it was made from in a `.json` beside it.

The array is memory-mapped, so that a corpus larger than RAM can be sampled from. The `.npy` gets its name last: a
token file without its description, or half of one, never lies around under a final name.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.lib import format as npy

from lmkit.errors import LmkitError, UsageError
from lmkit.storage import atomic_path, write_atomic

FORMAT = 1
_MAX_SIDECAR_BYTES = 1 << 16
_MAGIC = b"\x93NUMPY\x01\x00"
_HEADER = re.compile(
    rb"\{'descr': '([<>|]\w{1,8})', 'fortran_order': False, 'shape': \((\d{1,19}),\), \} *\n"
)
_WRITE_BACK_BYTES = 1 << 22  # that the disk is asked to take at a time
_CHECK_TOKENS = 1 << 24  # looked at in one go when ids are checked


@dataclass(frozen=True)
class TokenMeta:
    """The description of a token file; the content of its sidecar."""

    tokenizer_sha256: str
    vocab_size: int
    num_tokens: int
    num_documents: int
    num_bytes: int
    """Of the text."""
    source_sha256: str
    """Of the text files' bytes, one file behind the other."""
    format: int = FORMAT


@dataclass(frozen=True)
class TokenFile:
    """An open token file: `tokens` is a read-only memory map, one-dimensional, uint16 or uint32."""

    tokens: np.ndarray
    meta: TokenMeta


def token_dtype(vocab_size: int) -> np.dtype:
    """The narrowest of uint16 and uint32 that holds every id."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def sidecar_path(path: Path) -> Path:
    """tokens.npy -> tokens.json"""
    return path.with_suffix(".json")


class TokenFileWriter:
    """Write a token file piece by piece; leaving the `with` block without `finish` leaves nothing behind.

    Args:
        path: ends in `.npy`.

    Raises:
        ValueError: `path` does not end in `.npy`.
        UsageError: the description would replace a JSON file of another kind (the tokenizer, say).
    """

    def __init__(self, path: Path, *, vocab_size: int, tokenizer_sha256: str) -> None:
        if path.suffix != ".npy":
            raise ValueError(f"a token file ends in .npy: {path}")
        self._path = path
        self._vocab_size = vocab_size
        self._tokenizer_sha256 = tokenizer_sha256
        self._dtype = token_dtype(vocab_size)
        self._num_tokens = 0
        self._write_back_from = 0
        self._meta: TokenMeta | None = None

    def __enter__(self) -> TokenFileWriter:
        _refuse_to_replace_another_json(self._path)
        with ExitStack() as stack:  # what fails in here leaves nothing open: nobody would close it
            partial = stack.enter_context(atomic_path(self._path))
            self._file = stack.enter_context(open(partial, "wb"))
            self._write_header()
            self._stack = stack.pop_all()
        return self

    def append(self, ids: np.ndarray) -> None:
        """Add ids at the end.

        Raises:
            ValueError: an id is negative or beyond the vocabulary.
        """
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < self._vocab_size):
            raise ValueError(f"ids must be 0 to {self._vocab_size - 1}")
        self._file.write(ids.astype(self._dtype).data)
        self._num_tokens += len(ids)
        self._begin_write_back()

    def finish(self, *, num_documents: int, num_bytes: int, source_sha256: str) -> TokenMeta:
        """Complete the file; it appears when the `with` block ends."""
        header_end = self._write_header()
        assert header_end + self._num_tokens * self._dtype.itemsize == os.fstat(self._file.fileno()).st_size
        self._meta = TokenMeta(
            tokenizer_sha256=self._tokenizer_sha256,
            vocab_size=self._vocab_size,
            num_tokens=self._num_tokens,
            num_documents=num_documents,
            num_bytes=num_bytes,
            source_sha256=source_sha256,
        )
        return self._meta

    def _begin_write_back(self) -> None:
        """Have the disk take what was written since the last time: the fsync at the end then has little to wait for.

        Told that pages are not needed, Linux begins to write them, and forgets those that it wrote before; pages as
        new as these it keeps. Nobody waits here, and a failure is reported by the fsync.
        """
        size = self._num_tokens * self._dtype.itemsize
        if size - self._write_back_from >= _WRITE_BACK_BYTES and sys.platform == "linux":
            part = self._write_back_from, size - self._write_back_from
            os.posix_fadvise(self._file.fileno(), *part, os.POSIX_FADV_DONTNEED)
            self._write_back_from = size

    def _write_header(self) -> int:
        # numpy leaves room in the header for the count to grow, so that it can be overwritten in place.
        self._file.seek(0)
        shape = {
            "descr": npy.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self._num_tokens,),
        }
        npy.write_array_header_1_0(self._file, shape)
        end = self._file.tell()
        self._file.flush()
        return end

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._stack.__exit__(kind, value, trace)
            return
        abandoned = RuntimeError("the token file was not finished")
        if self._meta is None:
            self._stack.__exit__(RuntimeError, abandoned, None)
            raise abandoned
        with self._stack:
            self._path.unlink(missing_ok=True)  # an old file must not stand beside a new description
            write_atomic(
                sidecar_path(self._path), json.dumps(dataclasses.asdict(self._meta), indent=2) + "\n"
            )


def _refuse_to_replace_another_json(path: Path) -> None:
    if not sidecar_path(path).exists():
        return
    try:
        is_ours = "tokenizer_sha256" in _read_object(path)
    except LmkitError:  # what is no JSON object is ours, and damaged, only if it describes something
        is_ours = path.exists()
    if not is_ours:
        raise UsageError(
            f"{sidecar_path(path)}: exists; the description of {path.name} would replace it",
            hint="give the token file another name",
        )


def open_tokens(
    path: str | Path, *, tokenizer_sha256: str | None = None, check_ids: bool = True
) -> TokenFile:
    """Open a token file for reading, and refuse a damaged one.

    Args:
        tokenizer_sha256: `Tokenizer.sha256` of the tokenizer that is to be used with it.
        check_ids: read the whole file once to see that every id is in the vocabulary (about 5 GB/s from the page
            cache).

    Raises:
        UsageError: no such file, or it was made with another tokenizer.
        LmkitError: the file or its description is cut, empty, or not what it says it is.
    """
    path = Path(path)
    meta = _read_meta(path)
    tokens = _map(path, meta)
    if tokenizer_sha256 is not None and tokenizer_sha256 != meta.tokenizer_sha256:
        raise UsageError(
            f"{path}: made with tokenizer {meta.tokenizer_sha256}, not with {tokenizer_sha256}",
            hint="encode the text again, or use the tokenizer that the file was made with",
        )
    if check_ids:
        _check_ids(path, tokens, meta.vocab_size)
    return TokenFile(tokens, meta)


def _again(path: Path) -> str:
    """What to do about a damaged token file."""
    folder = path.parent.parent
    if path.parent.name == "tokens" and (folder / "stages.json").is_file():
        # `lmkit run` made it, and takes what is there for good. Of the run, the rest stays.
        return f"delete {path}, and lmkit run {shlex.quote(str(folder / 'recipe.toml'))} makes it again"
    return f"make it again with: lmkit data encode TEXT {shlex.quote(str(path))} --tokenizer TOKENIZER.json --force"


def _read_meta(path: Path) -> TokenMeta:
    if path.is_dir():
        raise UsageError(f"{path}: is a folder, not a token file", hint="name a .npy file in it")
    if not path.is_file():
        raise UsageError(f"{path}: no such token file", hint="make one with: lmkit data encode")
    if path.suffix != ".npy":
        raise UsageError(f"{path}: a token file ends in .npy", hint="make one with: lmkit data encode")
    sidecar = sidecar_path(path)
    content = _read_object(path)
    if content.get("format", FORMAT) != FORMAT:
        raise LmkitError(
            f"{sidecar}: format {content['format']!r}, but this lmkit reads {FORMAT}", hint="upgrade lmkit"
        )
    kinds = {field.name: field.type for field in dataclasses.fields(TokenMeta)}
    wrong = [f"{name} is missing" for name in kinds if name not in content]
    wrong += [f"unknown key {name!r}" for name in content if name not in kinds]
    wrong += [
        f"{name} is {value!r}" for name, value in content.items() if type(value).__name__ != kinds.get(name)
    ]
    if wrong:
        raise LmkitError(f"{sidecar}: {wrong[0]}", hint=_again(path))
    meta = TokenMeta(**content)
    if not 0 < meta.vocab_size <= 1 << 32:
        raise LmkitError(f"{sidecar}: vocab_size is {meta.vocab_size}", hint=_again(path))
    if meta.num_documents < 0 or meta.num_bytes < 0:
        raise LmkitError(f"{sidecar}: num_documents or num_bytes is negative", hint=_again(path))
    return meta


def _read_object(path: Path) -> dict[str, Any]:
    """The content of the description of a token file."""
    sidecar = sidecar_path(path)
    try:
        with open(sidecar, "rb") as file:
            text = file.read(_MAX_SIDECAR_BYTES + 1)
        content = json.loads(text) if len(text) <= _MAX_SIDECAR_BYTES else {}
    except FileNotFoundError:
        raise LmkitError(f"{sidecar}: missing; it describes {path.name}", hint=_again(path)) from None
    except IsADirectoryError:
        raise LmkitError(
            f"{sidecar}: is a folder; it has to describe {path.name}", hint=_again(path)
        ) from None
    except (ValueError, RecursionError):
        raise LmkitError(f"{sidecar}: not JSON; it has to describe {path.name}", hint=_again(path)) from None
    if not isinstance(content, dict):
        raise LmkitError(f"{sidecar}: no description of {path.name}", hint=_again(path))
    return content


def _map(path: Path, meta: TokenMeta) -> np.ndarray:
    expected = token_dtype(meta.vocab_size)
    dtype, length, offset, size = _read_header(path)
    if dtype != expected.str:
        raise LmkitError(f"{path}: holds {dtype}, not {expected.str}", hint=_again(path))
    if length != meta.num_tokens or size != offset + length * expected.itemsize:
        held = (size - offset) // expected.itemsize
        raise LmkitError(
            f"{path}: {held} tokens in the file, {length} in its header, {meta.num_tokens} in its description",
            hint=_again(path),
        )
    if length == 0:
        raise LmkitError(f"{path}: no tokens in it", hint="encode a text that is not empty")
    return np.memmap(path, expected, "r", offset, (length,))


def _read_header(path: Path) -> tuple[str, int, int, int]:
    """Return dtype, number of tokens, where they begin, and the size of the file.

    numpy's own reader evaluates the header as Python, with other errors for every kind of damage, and could be asked
    to unpickle an array of objects. Only the one form is read here in which numpy writes a flat array of numbers.
    """
    with open(path, "rb") as file:
        start = file.read(len(_MAGIC) + 2)
        header = file.read(int.from_bytes(start[-2:], "little"))
        offset, size = file.tell(), os.fstat(file.fileno()).st_size
    match = _HEADER.fullmatch(header) if start.startswith(_MAGIC) else None
    if match is None:
        raise LmkitError(f"{path}: not a .npy file with one row of whole numbers", hint=_again(path))
    return match[1].decode(), int(match[2]), offset, size


def _check_ids(path: Path, tokens: np.ndarray, vocab_size: int) -> None:
    if vocab_size == 1 << 8 * tokens.dtype.itemsize:
        return
    for start in range(0, len(tokens), _CHECK_TOKENS):
        part = tokens[start : start + _CHECK_TOKENS]
        if int(part.max()) >= vocab_size:
            at = int(np.argmax(part >= vocab_size))
            raise LmkitError(
                f"{path}: token {int(part[at])} at position {start + at}, but the vocabulary has {vocab_size}",
                hint=_again(path),
            )
